"""Adds engines to a running fleet, drains them and takes them out."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inl.errors import DeviceError, RequestError
from inl.fleet.dns_names import DNS_SECONDS
from inl.fleet.engine_link import EngineLink, State
from inl.fleet.replica_file import DRAIN, ReplicaFile, Wanted
from inl.serve.api_error import ApiError

if TYPE_CHECKING:
    from inl.fleet.client import FleetClient
    from inl.fleet.dns_names import DnsNames
    from inl.fleet.local_engines import LocalEngines
    from inl.fleet.placed_engines import PlacedEngines

log = logging.getLogger("inl.serve")

POLL_SECONDS = 0.05
"""Time between two looks at the open requests of an engine that is drained."""

EXPORT_SECONDS = 2.0
"""Time of an engine to export its requests; then others compute their tokens again."""

FILE_SECONDS = 0.5
"""Time between two looks at the file."""


@dataclass(slots=True, eq=False)
class Member:
    """An engine of the fleet."""

    engine: EngineLink
    link: asyncio.Task[None]
    is_local: bool
    """Whether the server has started it."""
    draining: asyncio.Task[None] | None = None
    seconds: float = 0.0
    """Time of its requests to finish, if it is drained."""
    is_leaving: bool = False
    """Whether the server leaves it once it has nothing open."""
    is_ending: bool = False
    """Whether that has begun."""
    is_named: bool = False
    """Whether a name of DNS has led to it."""


class Membership:
    """Which engines a server uses. Used by the event loop only.

    secret: that engines know. drain_seconds: time that the requests of an engine have
    to finish. local: engines that the server starts. file: the others, which several
    servers share; a change of one here is written to it.
    """

    def __init__(
        self,
        client: FleetClient,
        secret: bytes | None,
        drain_seconds: float,
        local: LocalEngines | PlacedEngines | None = None,
        file: ReplicaFile | None = None,
    ) -> None:
        self._client, self._secret = client, secret
        self._drain_seconds = drain_seconds
        self._local, self._file = local, file
        self._all: dict[str, Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that drain engines."""

    def rows(self) -> list[dict[str, Any]]:
        """Return what is known of each engine, for people and dashboards."""
        rows = self._client.members.engine_loads()
        for row in rows:
            member = self._all[row["address"]]
            row |= {"is_local": member.is_local, "is_leaving": member.is_leaving}
        return rows

    def scope_of(self, address: str) -> str:
        """Return which servers a change of an engine is for: "file" or "server"."""
        if self._file is None:
            return "server"
        member = self._all.get(address)
        return "server" if member is not None and member.is_local else "file"

    def use(self, address: str) -> None:
        """Use another engine; raises :class:`~inl.errors.DeviceError`."""
        is_local = self._local is not None and address in self._local
        secret = self._local.secret if self._local and is_local else self._secret
        engine = EngineLink(address, secret, self._client)
        self._client.engines.append(engine)
        link = asyncio.create_task(engine.run())
        self._all[address] = Member(engine, link, is_local)

    async def watch_names(self, names: DnsNames) -> None:
        """Use the engines of names, and leave those that are gone with their address.

        One whose address is gone first finishes its requests: it is stopping.
        """
        while True:
            found = await names.look_up()
            for address in sorted(found - self._all.keys()):
                try:
                    self.use(address)
                except DeviceError as error:
                    log.warning("engine %s is not used: %s", address, error)
                    continue
                self._all[address].is_named = True
            for address, member in list(self._all.items()):
                is_gone = member.is_named and address not in found
                if is_gone and member.engine.state is State.ABSENT:
                    log.info("engine %s: is gone", address)
                    await self._leave(member)
            await asyncio.sleep(DNS_SECONDS)

    async def close(self) -> None:
        """Leave all engines."""
        tasks = [*self._tasks, *(each.link for each in self._all.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What operators ask for.

    async def add(self, address: str | None, like: str | None = None) -> str:
        """Use another engine, or again one that was drained; returns its address.

        address: ``None`` starts another one here. like: address of an engine of this
        server whose settings it gets. Raises :class:`ApiError`.
        """
        if address is None:
            return await self._start(like)
        if like is not None:
            raise ApiError(400, "like: found it with an address; accepts one of them")
        if self.scope_of(address) == "file":
            EngineLink(address, self._secret, self._client)  # or it raises why not
            await self._write(address, "")
        elif address in self._all:
            if self._all[address].is_ending:
                raise ApiError(409, f"address: {address} ends", code="ends")
            self._release(self._all[address])
        else:
            self.use(address)
        log.info("engine %s: an operator adds it", address)
        return address

    async def _start(self, like: str | None) -> str:
        local = self._local
        if local is None:
            raise ApiError(
                400, "address: found none; accepts HOST:PORT, and none where the "
                "server starts engines (--replicas)", param="address",
            )  # fmt: skip
        if like is not None and like not in local:
            raise _unknown("like", like, local.addresses)
        address = await local.add(like)
        if address not in self._all:
            self.use(address)
        log.info("engine %s: an operator starts it", address)
        return address

    async def drain(self, address: str, seconds: float | None) -> None:
        """Give an engine no more requests; raises :class:`ApiError`.

        seconds: after which what it has not finished goes on elsewhere.
        """
        member = self._find(address)
        self._check_others(member)
        seconds = self._drain_seconds if seconds is None else seconds
        if self.scope_of(address) == "file":
            await self._write(address, f"{DRAIN}={seconds:g}")
        self._drain(member, seconds)
        log.info("engine %s: an operator drains it", address)

    async def remove(self, address: str, seconds: float | None) -> None:
        """Drain an engine, and leave it then; raises :class:`ApiError`.

        One of this server ends.
        """
        member = self._find(address)
        self._check_others(member)
        if self.scope_of(address) == "file":
            await self._write(address, None)
        self._leave_later(member, self._drain_seconds if seconds is None else seconds)
        log.info("engine %s: an operator removes it", address)

    def restart(self, address: str) -> None:
        """Replace the process of an engine of this server; raises :class:`ApiError`.

        Its requests finish, or go on elsewhere.
        """
        if self._local is None or not self._find(address).is_local:
            raise ApiError(
                400, f"address: {address} was not started by this server; accepts "
                "one of --replicas", param="address",
            )  # fmt: skip
        try:
            self._local.restart(address)
        except RequestError as error:
            raise ApiError(400, str(error), param="address") from error
        log.info("engine %s: an operator restarts it", address)

    def _find(self, address: str) -> Member:
        member = self._all.get(address)
        if member is None:
            raise _unknown("address", address, self._all)
        return member

    def _check_others(self, member: Member) -> None:
        """Refuse to stop the use of the last engine that is ready."""
        engine = member.engine
        is_ready = engine.state is State.READY
        if is_ready and not self._client.members.has_other(engine):
            raise ApiError(
                409,
                f"address: no engine but {engine.address} is ready; add another "
                "one first",
                code="last_engine",
            )

    # What is done.

    def _release(self, member: Member) -> None:
        """Give an engine requests again."""
        if member.draining is not None:
            member.draining.cancel()
            member.draining = None
        member.is_leaving = False
        self._client.hold(member.engine, is_held=False)

    def _drain(self, member: Member, seconds: float) -> None:
        self._client.hold(member.engine, is_held=True)
        if member.draining is not None:
            member.draining.cancel()
        member.seconds = seconds
        member.draining = task = asyncio.create_task(self._finish(member))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _leave_later(self, member: Member, seconds: float) -> None:
        member.is_leaving = True
        self._drain(member, seconds)

    async def _finish(self, member: Member) -> None:
        """Wait until an engine has nothing open, and leave it if it is to go."""
        client, engine = self._client, member.engine
        end = time.monotonic() + member.seconds
        is_exporting = False
        while left := client.open_requests(engine):
            is_over = time.monotonic() >= end and client.members.has_other(engine)
            if is_over and engine.exports and not is_exporting:
                is_exporting, end = True, time.monotonic() + EXPORT_SECONDS
                client.export(engine)
            elif is_over:
                log.info("engine %s: %d requests go on elsewhere", engine.address, left)
                client.abandon(engine)
            await asyncio.sleep(POLL_SECONDS)
        log.info("engine %s: has no open requests", engine.address)
        if member.is_leaving:
            await self._leave(member)

    async def _leave(self, member: Member) -> None:
        """Close the link to an engine; one of this server is shown until it ends."""
        engine = member.engine
        member.is_ending = True
        if not member.is_local:
            self._forget(engine)  # first, so that it can be added again
        member.link.cancel()
        await asyncio.gather(member.link, return_exceptions=True)
        if member.is_local and self._local is not None:
            await self._local.remove(engine.address)
            self._forget(engine)

    def _forget(self, engine: EngineLink) -> None:
        self._client.engines.remove(engine)
        del self._all[engine.address]

    async def watch(self) -> None:
        """Follow the file, and the engines that this server starts."""
        problem = ""
        while True:
            await asyncio.sleep(FILE_SECONDS)
            self.follow_local()
            if self._file is None:
                continue
            try:
                wanted = await asyncio.to_thread(self._file.news)
                if wanted is not None:
                    self.apply(wanted)
                problem = ""
            except (OSError, RequestError) as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("engines stay as they are: %s", problem)

    def follow_local(self) -> None:
        """Use the engines that the server has started, and leave those that it lost."""
        local = self._local
        if local is None:
            return
        for address in local.addresses:
            if address not in self._all:
                self.use(address)
        for address, member in list(self._all.items()):
            if member.is_local and not member.is_leaving and address not in local:
                self._leave_later(member, 0)

    def apply(self, wanted: Wanted) -> None:
        """Use the engines of the file, and no others but those of this server."""
        for address, seconds in wanted.items():
            member = self._all.get(address)
            if member is None:
                try:
                    self.use(address)
                except DeviceError as error:
                    log.warning("engine %s is not used: %s", address, error)
                    continue
                member = self._all[address]
            if seconds is None:
                self._release(member)
            elif (
                not member.engine.is_held
                or member.is_leaving
                or (member.seconds != seconds)
            ):
                member.is_leaving = False
                self._drain(member, seconds)
        for address, member in list(self._all.items()):
            if not (address in wanted or member.is_local or member.is_leaving):
                self._leave_later(member, self._drain_seconds)

    async def _write(self, address: str, wanted: str | None) -> None:
        """Change the file, and what it says here; raises :class:`ApiError`."""
        file = self._file
        assert file is not None, "checked by the caller"
        try:
            await asyncio.to_thread(file.write, address, wanted)
            self.apply(await asyncio.to_thread(file.read))
        except OSError as error:
            raise ApiError(
                409,
                f"{file.path}: cannot be written: {error.strerror}; change it where "
                "it is written",
                code="replica_file",
            ) from error


def _unknown(field: str, address: str, known: Any) -> ApiError:
    names = ", ".join(list(known)[:8])
    return ApiError(
        404, f"{field}: found {address!r:.80}, this server has {names}", param=field
    )
