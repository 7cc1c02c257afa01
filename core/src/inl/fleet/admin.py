"""Endpoints of a fleet for operators, which need an admin key."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.errors import DeviceError, RequestError
from inl.serve.api_error import ApiError
from inl.serve.dialect import parse
from inl.serve.operations import json_response

if TYPE_CHECKING:
    from inl.fleet.membership import Membership


class AddRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/fleet/add``; ``like``: see :meth:`Membership.add`."""

    address: str | None = None
    like: str | None = None


class DrainRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/fleet/drain`` and ``/fleet/remove``."""

    address: str
    seconds: float | None = None


class RestartRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/fleet/restart``."""

    address: str


class FleetAdmin:
    """Endpoints that list and change the engines of a server."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        post = partial(Route, methods=["POST"])
        return [
            Route("/fleet", self.list, methods=["GET"]),
            post("/fleet/add", self.add),
            post("/fleet/drain", self.drain),
            post("/fleet/remove", self.remove),
            post("/fleet/restart", self.restart),
        ]

    async def list(self, _: Request) -> Response:
        """Return what is known of each engine."""
        return json_response({"replicas": self._membership.rows()})

    async def add(self, request: Request) -> Response:
        """Use another engine, or one again that was drained."""
        fields = parse(await request.body(), AddRequest)
        try:
            address = await self._membership.add(fields.address, fields.like)
        except (DeviceError, RequestError) as error:
            raise ApiError(400, str(error), param="address") from error
        return self._row(address)

    async def drain(self, request: Request) -> Response:
        """Give an engine no more requests."""
        fields = _parse_drain(await request.body())
        await self._membership.drain(fields.address, fields.seconds)
        return self._row(fields.address)

    async def remove(self, request: Request) -> Response:
        """Drain an engine, and use it no more."""
        fields = _parse_drain(await request.body())
        await self._membership.remove(fields.address, fields.seconds)
        return self._row(fields.address)

    async def restart(self, request: Request) -> Response:
        """Replace the process of an engine of this server."""
        fields = parse(await request.body(), RestartRequest)
        self._membership.restart(fields.address)
        return self._row(fields.address)

    def _row(self, address: str) -> Response:
        """Return what is known of one engine, and whom its change is for."""
        rows: list[dict[str, Any]] = self._membership.rows()
        row = next(each for each in rows if each["address"] == address)
        return json_response({**row, "scope": self._membership.scope_of(address)})


def _parse_drain(body: bytes) -> DrainRequest:
    fields = parse(body, DrainRequest)
    if fields.seconds is not None and not 0 <= fields.seconds < inf:
        raise ApiError(
            400, f"seconds: found {fields.seconds}, accepts 0 and above",
            param="seconds",
        )  # fmt: skip
    return fields
