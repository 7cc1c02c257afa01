"""Addresses at which a test's server will listen, when workers wait for it already."""

from __future__ import annotations

import os
import socket
from itertools import count

FIRST, COUNT = 20_000, 12_000
"""Ports below those that the system gives to connections and to other servers."""

_numbers = count()


def unused_address():
    """Return HOST:PORT of this host on which nothing listens, other each time."""
    while True:
        port = FIRST + (os.getpid() * 61 + next(_numbers)) % COUNT
        try:
            with socket.create_server(("127.0.0.1", port)):
                return f"127.0.0.1:{port}"
        except OSError:
            continue
