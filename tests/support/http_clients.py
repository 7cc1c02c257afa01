"""Requests to the server at an address."""

from __future__ import annotations

import http.client
import json
from contextlib import contextmanager
from urllib.parse import urlsplit

WAIT_SECONDS = 300


class HttpClient:
    """Sends requests to ``url``, which a subclass sets."""

    @contextmanager
    def connection(self):
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname, address.port, timeout=WAIT_SECONDS
        )
        try:
            yield connection
        finally:
            connection.close()

    def send(self, method, path, body=None, headers=None):
        """Return status, headers and parsed body of a request."""
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        with self.connection() as connection:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read()
        kind = response.headers.get_content_type()
        parsed = json.loads(text) if kind == "application/json" else text
        return response.status, response.headers, parsed
