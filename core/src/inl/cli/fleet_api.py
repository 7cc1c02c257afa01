"""The admin endpoints of a server of several engines, as commands use them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inl.bounded_json import parse_object
from inl.errors import InvalidJson, RequestError

TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.2
"""Time between two looks at an engine that is awaited."""

MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class FleetApi:
    """The admin endpoints of a server; all raise :class:`RequestError`."""

    url: str
    key: str

    def replicas(self) -> list[dict[str, Any]]:
        """Return what the server knows of each engine."""
        rows: list[dict[str, Any]] = self._send("fleet", None)["replicas"]
        return rows

    def post(
        self, action: str, fields: dict[str, Any], wait: float = 0.0
    ) -> dict[str, Any]:
        """Change an engine; returns what is known of it.

        wait: seconds, if more than usual: a place takes long to start an engine.
        """
        return self._send(f"fleet/{action}", fields, max(wait, TIMEOUT_SECONDS))

    def until(
        self,
        address: str,
        is_so: Callable[[dict[str, Any]], bool],
        what: str,
        wait: float,
    ) -> dict[str, Any]:
        """Wait until an engine is as asked for; returns what is known of it.

        It never is if the server refuses or has left it.
        """
        end = time.monotonic() + wait
        while True:
            rows = [each for each in self.replicas() if each["address"] == address]
            if not rows:
                raise RequestError(
                    f"{address}: is gone: the log of the server says why"
                )
            (row,) = rows
            if is_so(row):
                return row
            if row["state"] == "refused":
                raise RequestError(f"{address}: is not used: {row['reason']}")
            if time.monotonic() > end:
                raise RequestError(
                    f"{address}: {what} within {wait:g} s (--wait): {row['state']}, "
                    f"{row['reason'] or 'no reason known'}, {row['open']} open requests"
                )
            time.sleep(POLL_SECONDS)

    def until_ready(self, address: str, wait: float) -> dict[str, Any]:
        """Wait until an engine gets requests."""
        what = "was not ready"
        return self.until(address, lambda row: row["state"] == "ready", what, wait)

    def until_gone(self, address: str, wait: float) -> None:
        """Wait until the server has left an engine."""
        end = time.monotonic() + wait
        while any(each["address"] == address for each in self.replicas()):
            if time.monotonic() > end:
                raise RequestError(
                    f"{address}: was not gone within {wait:g} s (--wait)"
                )
            time.sleep(POLL_SECONDS)

    def _send(
        self,
        path: str,
        fields: dict[str, Any] | None,
        seconds: float = TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        url = self.url
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"{url}: accepts a URL such as http://127.0.0.1:8000")
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        data = None if fields is None else json.dumps(fields).encode()
        try:
            request = Request(f"{url.rstrip('/')}/{path}", data, headers)
            with urlopen(request, timeout=seconds) as response:
                return parse_object(response.read(MOST_BYTES), url)
        except HTTPError as error:
            raise RequestError(_reason(url, error)) from error
        except InvalidJson as error:
            raise RequestError(f"{error}; accepts the URL of inl serve") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise RequestError(f"{url}: no server answers: {reason}") from error


def _reason(url: str, error: Any) -> str:
    """Return what a refusal says, and what to do about it."""
    if error.code == 404 and b"/fleet" in (body := error.read(MOST_BYTES)):
        return (
            f"{url}: has no engines to change; accepts a server with --replica, "
            "--replica-file or --replicas, and with --admin-key"
        )
    if error.code != 404:
        body = error.read(MOST_BYTES)
    try:
        return str(parse_object(body, url)["error"]["message"])
    except (InvalidJson, KeyError, TypeError):
        return f"{url}: status {error.code}"
