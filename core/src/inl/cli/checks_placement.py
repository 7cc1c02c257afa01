"""Checks of ``inl doctor --placement``: the places of devices that share a model."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import inl
from inl.backend.collectives import Rank
from inl.backend.rank_sockets import reserve_address
from inl.checkpoints.hub.resolve import resolve_model
from inl.cli.checks import Check
from inl.errors import InlError, ModelError
from inl.protocol.wire_fields import sent
from inl.workers.address import WorkerAddress, parse_worker

if TYPE_CHECKING:
    from inl.config import EngineConfig
    from inl.placement.placement import Placement
    from inl.runners.place_check import PlaceCheck, PlaceReport

JOIN_SECONDS = 30.0
"""Time for ranks to find each other, and to wait for one of them."""
CLOCK_SECONDS = 1.0
"""Difference of two clocks from which on their logs are hard to compare."""
DIGITS = 12
"""Of a digest, in a finding."""


def placement_checks(
    config: EngineConfig, model: str | None, seconds: float
) -> list[Check]:
    """Start a worker at the place of each rank, and return what is wrong there.

    seconds: time for workers to connect. Raises
    :class:`~inl.errors.DeviceError` and :class:`~inl.errors.ModelError` for a device
    or a model that does not exist here.
    """
    from inl.runners.place_check import PlaceCheck, inspect
    from inl.runners.rank_startup import rank_devices

    path = str(resolve_model(model))
    ours = inspect({"model": path})
    if problem := ours.get("model_problem"):
        raise ModelError(problem)
    place = parse_worker(config.backend)
    target, devices = rank_devices(config)
    scheme = "worker" if place is None else place.scheme
    addresses = [WorkerAddress(target, device, scheme) for device in devices]
    names = [f"rank {seat}, {each}" for seat, each in enumerate(addresses)]

    def start(seat: int) -> PlaceCheck | InlError:
        try:
            return PlaceCheck(
                addresses[seat],
                path,
                seat=seat,
                seats=len(addresses),
                seconds=seconds,
                abandoned=abandoned,
            )
        except InlError as error:
            return error

    abandoned = threading.Event()
    with ThreadPoolExecutor(len(addresses)) as pool, ExitStack() as stack:
        stack.callback(abandoned.set)  # Ctrl-C ends the waiting for workers
        started = list(pool.map(start, range(len(addresses))))
        for each in started:
            if not isinstance(each, InlError):
                stack.callback(each.close)
        checks = list(_findings(names, started, path, ours))
        able = [each for each in started if not isinstance(each, InlError)]
        is_well = len(able) == len(started) > 1
        is_well &= all(check.status != "wrong" for check in checks)
        if is_well and config.division.hosts == 1:
            checks += _exchanges(able, devices, config.division, pool)
        return checks


def _exchanges(
    started: Sequence[PlaceCheck],
    devices: Sequence[str],
    placement: Placement,
    pool: ThreadPoolExecutor,
) -> Iterator[Check]:
    """Let all ranks join a group and time their sums along each axis."""
    from inl.runners.place_check import LARGE_BYTES, SMALL_BYTES

    address, reserved = reserve_address()
    address = started[0].report.rank_address or address
    secret = secrets.token_hex(32)

    def ask(number: int) -> dict[str, Any]:
        rank = Rank(
            number=number, ranks=len(started), address=address, seconds=JOIN_SECONDS,
            axes=placement.axes, secret=secret,
        )  # fmt: skip
        given = {"device": devices[number], "rank": sent(rank)}
        try:
            return started[number].ask(exchange=given)
        except InlError as error:
            return {"exchange_problem": str(error)}

    with closing(reserved):
        found = list(pool.map(ask, range(len(started))))
    for number, each in enumerate(found):
        if "exchange" not in each:
            problem = each.get("exchange_problem", "its version of INL cannot measure")
            fix = "let these hosts connect to each other at any port"
            yield Check("wrong", f"rank {number}", f"cannot exchange: {problem}", fix)
            return
    for axis, size in placement.axes:
        seconds = [each["exchange"][axis] for each in found]
        small, large = map(max, zip(*seconds, strict=True))
        yield Check(
            "ok", f"{axis}={size}",
            f"a sum of {SMALL_BYTES >> 10} KiB takes {small * 1e6:.1f} us, one of "
            f"{LARGE_BYTES >> 20} MiB {LARGE_BYTES / large / 1e9:.2f} GB/s",
        )  # fmt: skip


def _findings(
    names: Sequence[str],
    started: Sequence[PlaceCheck | InlError],
    path: str,
    ours: Mapping[str, str],
) -> Iterator[Check]:
    first = started[0]
    meeting = "" if isinstance(first, InlError) else first.report.rank_address
    for name, each in zip(names, started, strict=True):
        if isinstance(each, InlError):
            fix = "start its worker, or see Another host in docs/devices.md"
            yield Check("wrong", name, str(each), fix)
            continue
        found = dict(each.report.found)
        yield _process(name, each.report)
        yield _clock(name, each.report)
        yield _device(name, found)
        yield _model(name, found, path, ours)
        if meeting and each is not first:
            yield _reach(name, each, meeting)


def _reach(name: str, check: PlaceCheck, meeting: str) -> Check:
    try:
        problem = check.ask(reach=meeting).get("reach_problem")
    except InlError as error:
        problem = str(error)
    if problem is None:
        return Check("ok", name, f"reaches rank 0 at {meeting}")
    finding = f"cannot reach rank 0 at {meeting}: {problem}"
    return Check("wrong", name, finding, "let these hosts connect to each other")


def _process(name: str, report: PlaceReport) -> Check:
    finding = (
        f"process {report.process}, inl-core {report.core}, Python {report.python}; "
        f"answers in {report.round_trip * 1000:.1f} ms"
    )
    if report.core != inl.__version__:
        fix = f"install inl-core {inl.__version__} there, as here"
        return Check("warn", name, finding, fix)
    return Check("ok", name, finding)


def _clock(name: str, report: PlaceReport) -> Check:
    """Steps do not need equal clocks; people who compare logs do."""
    ahead = report.clock_ahead
    side = "ahead of" if ahead > 0 else "behind"
    if abs(ahead) < CLOCK_SECONDS:
        return Check("ok", name, f"its clock is {abs(ahead) * 1000:.1f} ms {side} ours")
    finding = f"its clock is {abs(ahead):.1f} s {side} ours"
    return Check("warn", name, finding, "synchronize the clocks, as by chrony")


def _device(name: str, found: Mapping[str, str]) -> Check:
    if problem := found.get("device_problem"):
        return Check("wrong", name, problem, "run `inl doctor` there")
    return Check("ok", name, f"has {found.get('device')}")


def _model(
    name: str, found: Mapping[str, str], path: str, ours: Mapping[str, str]
) -> Check:
    fix = f"copy {path} there, to the same path"
    if problem := found.get("model_problem"):
        return Check("wrong", name, problem, fix)
    digest = str(found.get("model"))
    if digest != ours["model"]:
        finding = (
            f"{path}: found the digest {digest[:DIGITS]}, here {ours['model'][:DIGITS]}"
        )
        return Check("wrong", name, finding, fix)
    return Check("ok", name, f"has the model, digest {digest[:DIGITS]}")
