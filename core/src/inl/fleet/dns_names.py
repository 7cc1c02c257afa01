"""Names of DNS with an address for each engine, as those of Kubernetes have."""

from __future__ import annotations

import asyncio
import logging
import socket

from inl.errors import DeviceError
from inl.workers.settings import parse_address, show_address

log = logging.getLogger("inl.serve")

PREFIX = "dns:"
"""Before ``HOST:PORT`` where all addresses of the host are engines."""

DNS_SECONDS = 2.0
"""Time between two questions for the addresses."""


class DnsNames:
    """The engines behind names. Used by the event loop only.

    names: ``dns:HOST:PORT``. Raises :class:`~inl.errors.DeviceError` for others.
    """

    def __init__(self, names: list[str]) -> None:
        self._found: dict[str, frozenset[str]] = {}
        """Last addresses of each name; of one that is not known, those before."""
        self._problems: dict[str, str] = {}
        for name in names:
            parse_address(name.removeprefix(PREFIX), "--replica dns:")
            self._found[name] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._found)

    async def look_up(self) -> frozenset[str]:
        """Return the addresses of all engines; those of a failed question stay."""
        loop = asyncio.get_running_loop()
        for name in self._found:
            host, port = parse_address(name.removeprefix(PREFIX))
            problem = ""
            try:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._found[name] = frozenset(
                    show_address(str(each[4][0]), port) for each in found
                )
            except (OSError, DeviceError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            if problem != self._problems.get(name, ""):
                if problem:
                    log.warning("%s: engines stay as they are: %s", name, problem)
                self._problems[name] = problem
        return frozenset().union(*self._found.values())
