"""Checks of the collectives of a backend that offers ranks: each verb, along each axis.

Ranks are threads where the backend allows it, and processes elsewhere.
"""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.backend.collectives import PIPELINE, TENSOR, Rank, Ranks
from inl.backend.rank_sockets import reserve_address
from inl.config import EngineConfig
from inl.errors import BackendUnavailable
from inl.plugin import registry
from inl.protocol.wire_fields import sent
from inl.runners.rank_startup import joined_backend, rank_devices
from inl.testing.check import Check, CheckFailed
from inl.testing.rank_process import join_and_check
from inl.testing.rank_program import VERBS

if TYPE_CHECKING:
    from inl.testing.target import Target

SECONDS = 60.0
"""Time for a rank to wait for another one."""
GROUP_SECONDS = 300.0
"""Time for all ranks of a group to start and to end."""
LINES = 6
"""Last lines of a failed rank's output that are shown."""

Faults = dict[str, list[str]]


def rank_checks(target: Target) -> Iterator[Check]:
    """Check the verbs of the backend's ranks, or that it refuses a group by name.

    Nothing where the machine has fewer devices than ranks.
    """
    ranks = target.backend.offers(Ranks)
    if ranks is None:
        yield Check("ranks", "ranks/refused", partial(_check_refusal, target))
        return
    axes = grid_of(target, ranks)
    count = math.prod(size for _, size in axes)
    if not ranks.in_threads and not _has_devices(target, count):
        return
    group = RankGroup(target, ranks, axes)
    for verb in VERBS:
        yield Check("ranks", f"ranks/{verb}", partial(group.check, verb))


def _check_refusal(target: Target) -> None:
    rank = Rank(number=0, ranks=2, address="127.0.0.1:1", secret="")
    try:
        joined_backend(target.backend, rank)
    except BackendUnavailable as error:
        if type(target.backend).__name__ in str(error):
            return
        raise CheckFailed(f"refused without its name: {error}") from error
    raise CheckFailed("offers no Ranks, and joined a group of 2")


def grid_of(target: Target, ranks: Ranks) -> tuple[tuple[str, int], ...]:
    """Return the axes of the group: two where that is cheap, or asked for."""
    has_two = PIPELINE in ranks.axes and (ranks.in_threads or target.full)
    return ((PIPELINE, 2), (TENSOR, 2)) if has_two else ((TENSOR, 2),)


def _has_devices(target: Target, count: int) -> bool:
    config = EngineConfig(backend=str(target.device), tensor_parallel=count)
    known = {info.index for info in registry().find(target.device.type).devices}
    names = rank_devices(config)[1]
    return {int(name.rpartition(":")[2]) for name in names} <= known


class RankGroup:
    """Opens ranks and checks their verbs: all at once in processes, each in threads."""

    def __init__(
        self, target: Target, ranks: Ranks, axes: tuple[tuple[str, int], ...]
    ) -> None:
        self._target, self._ranks = target, ranks
        self._axes, self._count = axes, math.prod(size for _, size in axes)
        self._found: Faults = {}

    def check(self, verb: str) -> None:
        """Raise :class:`CheckFailed` with the first fault of a verb on any rank."""
        if verb not in self._found:
            verbs = [verb] if self._ranks.in_threads else list(VERBS)
            self._found |= self._run(verbs)
        if found := self._found[verb]:
            more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
            raise CheckFailed(f"{verb}: {found[0]}{more}")

    def _run(self, verbs: list[str]) -> Faults:
        address, reserved = reserve_address()
        secret = secrets.token_hex(32)
        ranks = [
            Rank(
                number=number,
                ranks=self._count,
                address=address,
                seconds=SECONDS,
                axes=self._axes,
                secret=secret,
            )
            for number in range(self._count)
        ]
        with reserved, tempfile.TemporaryDirectory() as folder:
            run = self._in_threads if self._ranks.in_threads else self._in_processes
            parts = run(ranks, verbs, Path(folder))
        return {verb: [text for part in parts for text in part[verb]] for verb in verbs}

    def _in_threads(
        self, ranks: list[Rank], verbs: list[str], folder: Path
    ) -> list[Faults]:
        def one(rank: Rank) -> Faults:
            return join_and_check(self._ranks, rank, self._target.seed, verbs, folder)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    def _in_processes(
        self, ranks: list[Rank], verbs: list[str], folder: Path
    ) -> list[Faults]:
        config = EngineConfig(
            backend=str(self._target.device), tensor_parallel=self._count
        )
        children = []
        for rank, device in zip(ranks, rank_devices(config)[1], strict=True):
            given: dict[str, Any] = {
                "device": device, "rank": sent(rank), "verbs": verbs,
                "seed": self._target.seed, "folder": str(folder),
            }  # fmt: skip
            command = [sys.executable, "-m", "inl.testing.rank_process"]
            child = subprocess.Popen(
                [*command, json.dumps(given)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            children.append(child)
        end = time.monotonic() + GROUP_SECONDS
        try:
            return [_read(*each, end) for each in enumerate(children)]
        finally:
            for child in children:
                child.kill()
                child.wait()


def _read(number: int, child: subprocess.Popen[str], end: float) -> Faults:
    """Return what a rank has printed."""
    try:
        output, _ = child.communicate(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"rank {number}: did not end in {GROUP_SECONDS:g} s"
        ) from None
    lines = output.strip().splitlines()
    if child.returncode:
        shown = "\n    ".join(lines[-LINES:])
        raise CheckFailed(f"rank {number}: exit status {child.returncode}\n    {shown}")
    faults: Faults = json.loads(lines[-1])
    return faults
