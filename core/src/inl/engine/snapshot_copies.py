"""Copies recurrent state between slots of the runner and snapshots in host memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inl.errors import OutOfMemory
from inl.protocol.runner import MAX_READS, CacheWrite
from inl.spec.cache_layout import SLOT_GROUP, copied
from inl.spec.message import READ, WRITE, transfer_frame

if TYPE_CHECKING:
    from inl.kv.snapshots import Snapshot
    from inl.kv_tiers.state_snapshots import StateSnapshots
    from inl.protocol.runner import Runner
    from inl.recording.recorder import Recorder
    from inl.scheduling.plan import Plan
    from inl.scheduling.scheduler import Scheduler
    from inl.spec.cache_layout import Parts


@dataclass(slots=True)
class PendingSnapshot:
    """State that was asked for and not stored."""

    step: int
    snapshot: Snapshot
    parts: Parts | None = None
    """The contents, once they were read."""


class SnapshotCopies:
    """Writes and reads the state of slots; keeps the order of frames.

    What was read is stored once its step is collected and the block before it is in the
    prefix cache: a row that has ended earlier, or whose step has failed, leaves
    other state.
    """

    def __init__(self, snapshots: StateSnapshots, recorder: Recorder | None) -> None:
        self.snapshots, self._recorder = snapshots, recorder
        self._pending: deque[PendingSnapshot] = deque()

    def restore(self, plan: Plan, runner: Runner) -> None:
        """Write the state that a plan's admissions need, before its frames.

        Raises what the runner raises.
        """
        for slot, key in plan.restores:
            frame = transfer_frame(WRITE, SLOT_GROUP, [slot])
            written = CacheWrite(frame, self.snapshots.take(key))
            if self._recorder is not None:
                self._recorder.add(written)
            runner.write(*written)

    def read(self, plan: Plan, runner: Runner) -> None:
        """Ask for the state after a plan's step, whose frames were submitted.

        Raises what the runner raises.
        """
        for snapshot in plan.snapshots:
            unread = [each for each in self._pending if each.parts is None]
            if len(unread) == MAX_READS:
                self._wait(unread[0], runner)
            frame = transfer_frame(READ, SLOT_GROUP, [snapshot.slot])
            try:
                runner.submit(frame)
            except OutOfMemory:
                continue  # it is not taken
            if self._recorder is not None:
                self._recorder.add(frame)
            self._pending.append(PendingSnapshot(plan.step, snapshot))

    def _wait(self, pending: PendingSnapshot, runner: Runner) -> None:
        pending.parts = copied(runner.read())

    def wait(self, plan: Plan, runner: Runner) -> None:
        """Wait for the state after a step that is collected.

        Raises what the runner raises.
        """
        for each in self._pending:
            if each.step <= plan.step and each.parts is None:
                self._wait(each, runner)

    def wait_all(self, runner: Runner) -> None:
        """Wait for all that was asked for; raises what the runner raises."""
        for each in self._pending:
            if each.parts is None:
                self._wait(each, runner)

    def store(self, plan: Plan, scheduler: Scheduler) -> None:
        """Store the state after a step whose output is processed."""
        while self._pending and self._pending[0].step <= plan.step:
            request, _, stop = self._pending[0].snapshot
            parts = self._pending.popleft().parts
            size = scheduler.limits.block_size
            if parts is not None and request.published_blocks * size >= stop:
                key = scheduler.block_keys(request)[stop // size - 1]
                self.snapshots.put(key, parts)

    def reset(self) -> None:
        """Drop what was not stored: the runner was reset or replaced."""
        self._pending.clear()
