"""The scheduler decides in integers: no tensor and no array of floats reaches it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from enum import Enum
from random import Random

import numpy as np
import pytest

from inl.engine.core import EngineCore
from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.protocol.runner import Limits
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.speculation.planner import Speculation
from inl.testing.hash_runner import HashRunner
from soak import Parts, World
from toy_guide import ToyGuide

ROOMS = ("inl.scheduling", "inl.kv")
VALUES = ("inl.scheduling.", "inl.kv.", "inl.spec.", "inl.protocol.")
"""Modules of the objects that a scheduler may hold and look into."""
BEHIND = (Speculation, PromptEmbeddings, ToyGuide)
"""Implementations of the interfaces that it calls; their contents are not its own."""
SCALARS = (int, float, str, bytes, type(None), Enum, type, Exception)


def strangers(value, seen, *, deep):
    """Objects that a scheduler must not have, reachable from a value.

    seen: ids of objects that were visited. deep: whether to look into objects, and not
    into containers only.
    """
    if isinstance(value, np.generic):
        return [value]
    if id(value) in seen or isinstance(value, SCALARS + BEHIND):
        return []
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return [] if value.dtype == np.int32 else [value]
    if isinstance(value, Mapping):
        parts = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque | type({}.values())):
        parts = value
    elif type(value).__module__.startswith(VALUES):
        parts = _fields(value) if deep else []
    elif isinstance(value, range) or callable(value) or hasattr(value, "__next__"):
        parts = []
    else:
        return [value]
    return [one for part in parts for one in strangers(part, seen, deep=deep)]


def _fields(value):
    names = [name for kind in type(value).__mro__ for name in _slots(kind)]
    slotted = [getattr(value, name) for name in names if hasattr(value, name)]
    return slotted + list(getattr(value, "__dict__", {}).values())


def _slots(kind):
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


class Watch:
    """Collects what is passed to, and returned by, each function of the scheduler."""

    def __enter__(self):
        self.calls, self.strangers = 0, []
        sys.setprofile(self)
        return self

    def __call__(self, frame, event, returned):
        if not frame.f_globals.get("__name__", "").startswith(ROOMS):
            return
        if event == "call":
            self.calls += 1
            values = list(frame.f_locals.values())
            self.strangers += strangers(values, set(), deep=False)
        elif event == "return":
            self.strangers += strangers(returned, set(), deep=False)

    def __exit__(self, *_):
        sys.setprofile(None)


@pytest.mark.parametrize("parts", [{"speculation": Speculation}, {"adapters": True}])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_scheduler_gets_and_holds_integers_only(parts, seed):
    world = World(Random(seed), Parts(**parts))
    with Watch() as watch:
        world.run(60)
    assert watch.calls > 3_000
    assert watch.strangers == []
    assert strangers(world.scheduler, set(), deep=True) == []


def embedded_request():
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    return Request([0] * 11, max_tokens=5, embeddings=PromptEmbeddings({2: rows}, 11))


def test_a_scheduler_never_sees_the_rows_of_embeddings():
    limits = Limits(4, (40,), 4, 8, 997, embedding=3)
    core = EngineCore(HashRunner(limits), SchedulerConfig(token_budget=5))
    with Watch() as watch:
        requests = [embedded_request() for _ in range(3)]
        for request in requests:
            core.add(request)
        while core.has_work:
            core.step()
            assert strangers(core.scheduler, set(), deep=True) == []
    assert {len(request.output_ids) for request in requests} == {5}
    assert watch.calls > 500
    assert watch.strangers == []


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), np.float64(1), object()])
def test_this_check_can_fail(value):
    scheduler = Scheduler(Limits(4, (40,), 4, 8, 997))
    request = Request([1, 2], max_tokens=5)
    scheduler.add(request)
    request.token_mask = value
    (found,) = strangers(scheduler, set(), deep=True)
    assert found is value
    with Watch() as watch:
        request.step_kind(value)
    (found,) = watch.strangers
    assert found is value
