"""Snapshots of recurrent state in random steps, and planted faults that are found."""

from __future__ import annotations

import pytest

from depth import mostly_full
from inl.engine import core
from inl.engine.snapshot_copies import SnapshotCopies
from inl.kv.kv_cache_manager import KVCacheManager
from inl.kv_tiers.state_snapshots import StateSnapshots
from inl.scheduling.scheduler import Scheduler
from soak import Parts, WrongText, soak

KINDS = {"plain": {}, "repeats": {"repeats": True}, "adapters": {"adapters": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", mostly_full((0, 1, 2)))
def test_outputs_with_snapshots_match_the_oracle(seed, kind, report, depth):
    steps, least = depth(1_500, 4_000, 25_000), depth(5, 5, 20)
    parts = Parts(snapshots=StateSnapshots, pooled=kind == "adapters", **KINDS[kind])
    counts = soak(seed, steps, parts, world_steps=300)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    assert counts["preemptions"] > 0
    for name in (
        "prefix hit tokens",
        "cancelled",
        "stop",
        "length",
        "snapshots taken",
        "snapshots restored",
        "snapshots dropped",
    ):
        assert counts[name] > least, name


class OtherBorder(StateSnapshots):
    """Sometimes stores state under the key of the border after it."""

    last = None

    def put(self, key, parts):
        super().put(key, parts if self.last is None else self.last)
        self.last = parts if len(self) % 5 == 0 else None


class StaleSnapshot(StateSnapshots):
    """Finds state that was dropped, by a key, in what replaced it."""

    newest = None

    def put(self, key, parts):
        super().put(key, parts)
        self.newest = parts

    def holds(self, key):
        return super().holds(key) or (self.newest is not None and key[0] < 16)

    def take(self, key):
        return super().take(key) if super().holds(key) else self.newest


class AnyBorder(KVCacheManager):
    """Shares blocks beyond the last snapshot."""

    def admit(self, *args, **options):
        self.restorable_prefix = self.cached_prefix
        return super().admit(*args, **options)


class AnySnapshot(StateSnapshots):
    """Has some state for every key."""

    newest = None

    def take(self, key):
        return super().take(key) if super().holds(key) else self.newest

    def put(self, key, parts):
        super().put(key, parts)
        self.newest = parts


class NotRestored(Scheduler):
    """Begins with the state that the slot's last sequence has left."""

    def plan(self):
        plan = super().plan()
        plan.restores.clear()
        return plan


class OtherSlot(Scheduler):
    """Reads the state of another row of the step."""

    def plan(self):
        plan = super().plan()
        for at, each in enumerate(plan.snapshots):
            slot = plan.chunks[-1].request.slot
            plan.snapshots[at] = each._replace(slot=slot)
        return plan


class Unaligned(Scheduler):
    """Takes state of the last chunk as that of the border before it."""

    def plan(self):
        plan = super().plan()
        size, taken = self.limits.block_size, {each.request for each in plan.snapshots}
        for request, _, stop, _ in plan.chunks:
            border = stop - stop % size
            if request.has_snapshots and border and stop % size:
                found = type(plan.snapshots[0]) if plan.snapshots else None
                if found is not None and request not in taken:
                    plan.snapshots.append(found(request, request.slot, border))
        return plan


class LateRestore(SnapshotCopies):
    """Writes state after the step that reads it."""

    def restore(self, plan, runner):
        pass

    def read(self, plan, runner):
        super().restore(plan, runner)
        super().read(plan, runner)


@pytest.mark.parametrize(
    "planted",
    [
        {"snapshots": OtherBorder},
        {"snapshots": StaleSnapshot},
        {"snapshots": AnySnapshot, "kv_cache": AnyBorder},
        {"scheduler": NotRestored},
        {"scheduler": OtherSlot},
        {"scheduler": Unaligned},
    ],
    ids=lambda planted: next(iter(planted.values())).__name__,
)
def test_planted_faults_of_snapshots_change_the_output(planted):
    parts = Parts(**{"snapshots": StateSnapshots, **planted})
    with pytest.raises(WrongText):
        soak(0, 6_000, parts, world_steps=300)


def test_state_that_is_written_after_its_step_changes_the_output(monkeypatch):
    monkeypatch.setattr(core, "SnapshotCopies", LateRestore)
    with pytest.raises(WrongText):
        soak(0, 6_000, Parts(snapshots=StateSnapshots), world_steps=300)
