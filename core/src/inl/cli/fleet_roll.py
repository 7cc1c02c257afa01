"""``inl fleet roll``: replaces the processes of engines, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.cli.fleet_api import FleetApi


class Roll:
    """Replaces the processes of engines, one after another.

    Raises :class:`RequestError` at the first one that does not serve afterwards; those
    after it stay as they are.
    """

    def __init__(
        self,
        server: FleetApi,
        seconds: float | None,
        wait: float,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._wait, self._say = server, wait, say
        self._limit = {} if seconds is None else {"seconds": seconds}

    def run(self, address: str | None, *, in_place: bool) -> None:
        """Replace all engines, or one."""
        rows = self._server.replicas()
        chosen = [
            row
            for row in rows
            if address in (None, row["address"]) and not row["is_leaving"]
        ]
        if not chosen:
            raise RequestError(
                f"roll: found no engine {address or ''}; see inl fleet list"
            )
        for row in chosen:
            if not row["is_local"]:
                self._elsewhere(row)
            elif in_place:
                self._again(row)
            else:
                self._beside(row)
        self._say(f"{len(chosen)} of {len(chosen)} engines were replaced")

    def _beside(self, row: dict[str, Any]) -> None:
        """Start an engine, and let the old one go once the new one serves."""
        old, server = row["address"], self._server
        new = server.post("add", {"like": old}, self._wait)["address"]
        self._say(f"{old}: {new} starts in its place")
        try:
            server.until_ready(new, self._wait)
        except RequestError:
            self._take_back(new)
            raise
        left = server.post("remove", {"address": old, **self._limit})["open"]
        self._say(f"{old}: {new} serves; {left} open requests finish")
        server.until_gone(old, self._wait)

    def _take_back(self, address: str) -> None:
        """Remove an engine that has not become ready, if it is still there."""
        if any(each["address"] == address for each in self._server.replicas()):
            self._server.post("remove", {"address": address, "seconds": 0})

    def _again(self, row: dict[str, Any]) -> None:
        """End an engine, whose server starts the next one."""
        address = row["address"]
        self._server.post("restart", {"address": address})
        self._say(f"{address}: ends once its {row['open']} open requests have")
        self._until_new(row)
        self._serve_again(address)

    def _elsewhere(self, row: dict[str, Any]) -> None:
        """Wait until somebody has replaced the process at an address."""
        address, server = row["address"], self._server
        server.post("drain", {"address": address, **self._limit})
        self._say(f"{address}: is drained; {row['open']} open requests finish")
        server.until(address, lambda now: not now["open"], "was not idle", self._wait)
        self._say(f"{address}: has no open requests; restart it now")
        try:
            self._until_new(row)
        except RequestError as error:
            raise RequestError(f"{error}; it stays drained") from error
        server.post("add", {"address": address})
        self._serve_again(address)

    def _until_new(self, row: dict[str, Any]) -> None:
        address, before = row["address"], row["process"]

        def is_new(now: dict[str, Any]) -> bool:
            states = ("ready", "warming", "draining")
            return now["process"] != before and now["state"] in states

        self._server.until(address, is_new, "did not come back", self._wait)

    def _serve_again(self, address: str) -> None:
        self._server.until_ready(address, self._wait)
        self._say(f"{address}: serves again")
