"""A whole step as one list of instructions, recorded once and then run again."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.spec.tree import leaves, tree_map
from inl_cpu.fusion import Item, fuse
from inl_cpu.memory import empty, lease_of
from inl_cpu.recording import Call, PythonStep
from inl_cpu.tensor import Tensor, plain

if TYPE_CHECKING:
    from inl_cpu.command_emitter import Stage
    from inl_cpu.library import Machine

MOST: Final = 64
"""Recordings that a backend keeps: prompts come in ever new sizes."""


class Recording:
    """What one call of a function did, to be done again with another message."""

    def __init__(
        self, function: Callable[..., Any], stage: Stage, args: tuple[Any, ...]
    ) -> None:
        weights, frame, state = args
        self._known = list(leaves(state))
        self.weights = weights
        self.frame = empty(frame.shape, frame.dtype)
        with stage.recording() as tape:
            message = stage.lent(self.frame)
            *self._results, after = function(weights, message, state)
            _settle(stage, state, after)
        self.state = state
        self.items = fuse(tape.steps, _loans(self._results))
        self._runs = list(_segments(self.items, stage.machine))
        self._kept = tape

    def fits(self, weights: Any, state: Any) -> bool:
        """Whether it was recorded for these weights and this state."""
        if weights is not self.weights:
            return False
        if state is self.state:
            return True
        found = list(leaves(state))
        if len(found) != len(self._known):
            return False
        return all(a is b for a, b in zip(found, self._known, strict=True))

    def __call__(self, frame: Any) -> tuple[Any, ...]:
        """Run it on a message; results are copied out of the scratch memory."""
        np.copyto(self.frame, frame)
        for run in self._runs:
            run()
        return (*(tree_map(_copied, result) for result in self._results), self.state)


class Program:
    """A function of (weights, message, state) that is recorded when first called."""

    def __init__(
        self,
        function: Callable[..., Any],
        stage: Stage,
        recordings: OrderedDict[Program, Recording],
    ) -> None:
        self._function, self._stage = function, stage
        self._recordings = recordings

    def __call__(self, weights: Any, frame: Any, state: Any) -> tuple[Any, ...]:
        known = self._recordings.get(self)
        if known is None or not known.fits(weights, state):
            known = Recording(self._function, self._stage, (weights, frame, state))
            self._recordings[self] = known
            if len(self._recordings) > MOST:
                self._recordings.popitem(last=False)
        else:
            self._recordings.move_to_end(self)
        return known(frame)


def _loans(tree: Any) -> set[int]:
    arrays = [leaf for leaf in leaves(tree) if isinstance(leaf, np.ndarray)]
    return {lease.number for lease in map(lease_of, arrays) if lease is not None}


def _copied(leaf: Any) -> Any:
    return np.array(plain(leaf)) if isinstance(leaf, Tensor) else leaf


def _settle(stage: Stage, before: Any, after: Any) -> None:
    """Bring state that was not written in place back to where it was."""
    for old, new in zip(leaves(before), leaves(after), strict=True):
        if new is not old:
            stage.python(partial(np.copyto, old, plain(new)), [new])


def _segments(items: list[Item], machine: Machine) -> Iterator[Callable[[], object]]:
    """Runs of native calls as one program each, and Python steps between them."""
    for native, group in groupby(items, lambda item: isinstance(item, Call)):
        if native:
            yield _native([call for call in group if isinstance(call, Call)], machine)
        else:
            yield from (step.run for step in group if isinstance(step, PythonStep))


def _native(calls: list[Call], machine: Machine) -> Callable[[], object]:
    packed = ctypes.create_string_buffer(b"".join(call.packed() for call in calls))

    def run() -> None:
        machine.run(ctypes.addressof(packed), len(calls))

    return run
