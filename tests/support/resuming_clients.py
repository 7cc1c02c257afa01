"""Clients that go on behind their last event, at any front-end, until a stream ends."""

from __future__ import annotations

import http.client
import json
import time
from collections import defaultdict
from math import ceil
from urllib.parse import urlsplit

from http_clients import WAIT_SECONDS
from inl.serve.resuming import last_event_id

SILENT_SECONDS = 2.0
"""Time without a byte after which a client asks another front-end; it doubles."""

PAUSE_SECONDS = 0.02
"""Time between two attempts of a client that nobody answers."""

LAST = ("message_stop", "response.completed", "response.incomplete")
"""Types of last events; others end with ``[DONE]``."""


class Pauses:
    """Seconds that something takes, by cause, and by what has happened last.

    What clients note is from the last event before a disturbance to the next one.
    """

    def __init__(self):
        self.seconds = defaultdict(list)
        self.act = ""
        """What happens now."""

    def note(self, cause, seconds):
        self.seconds[cause].append(seconds)
        if self.act:
            self.seconds[f"{cause}, {self.act}"].append(seconds)

    def __str__(self):
        lines = []
        for cause, found in sorted(self.seconds.items()):
            found.sort()
            at = [found[ceil(share * len(found)) - 1] for share in (0.5, 0.99, 1)]
            lines.append(
                f"{cause}: {len(found)}, p50 {at[0]:.3f} s, p99 {at[1]:.3f} s, "
                f"most {at[2]:.3f} s"
            )
        return "\n".join(lines)


def whole_stream(urls, path, body, draw, pauses):
    """Return (id, data) of all events of a stream, however often it is cut off."""
    events, data = [], json.dumps({**body, "stream": True})
    seconds, cause, engine, at = SILENT_SECONDS, None, None, None
    while not (events and is_last(events[-1][1])):
        last = events[-1][0] if events else None
        try:
            for number, text in _events(draw.choice(urls), path, data, last, seconds):
                now, uses = time.monotonic(), _engine_of(number)
                if at is not None and (cause or uses != engine):
                    pauses.note(cause or "engine lost", now - at)
                cause, engine, at = None, uses, now
                events.append((number, text))
            cause = cause or "front-end lost"
        except TimeoutError:
            cause, seconds = "front-end silent", min(2 * seconds, WAIT_SECONDS)
        except (OSError, http.client.HTTPException):
            cause = cause or "front-end lost"
            time.sleep(PAUSE_SECONDS)
    return events


def is_last(data):
    return data == "[DONE]" or json.loads(data).get("type") in LAST


def _engine_of(number):
    return last_event_id([(b"last-event-id", number.encode())]).engine


def _events(url, path, data, last, seconds):
    """Yield (id, data) of the events of one connection."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname, address.port, timeout=seconds
    )
    try:
        headers = {} if last is None else {"Last-Event-ID": last}
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        if response.status == 503:  # it stops, or has no room
            assert int(response.headers["retry-after"]) >= 1
            raise ConnectionRefusedError
        assert response.status == 200, response.read()
        number = None
        for line in response:
            if not line.endswith(b"\n"):  # cut off
                return
            name, _, text = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                number = text
            elif name == "data":
                assert number is not None, text  # errors have none
                yield number, text
                number = None
    finally:
        connection.close()
