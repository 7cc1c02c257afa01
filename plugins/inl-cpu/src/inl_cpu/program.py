"""A model step as one list of instructions, recorded once and replayed."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.spec.tree import leaves, tree_map
from inl_cpu.encoding import Instruction, Operand
from inl_cpu.fusion import fuse
from inl_cpu.memory import empty, handle_of
from inl_cpu.tensor import Tensor, plain

if TYPE_CHECKING:
    from inl_cpu.command_emitter import CommandEmitter
    from inl_cpu.library import Machine
    from inl_cpu.recording import Recording, Step

MAX_PROGRAMS: Final = 64
"""Recorded programs that a backend keeps; every prompt length records another."""


class RecordedSteps:
    """The steps of a recording, fused, and its results."""

    def __init__(
        self, recording: Recording, results: Sequence[Any], machine: Machine
    ) -> None:
        self._results = results
        self.steps = fuse(recording.steps, _buffers(results))
        self._runs = list(_segments(self.steps, machine))
        self._recording = recording  # keeps the operands alive

    def __call__(self) -> tuple[Any, ...]:
        """Run them; results are copied out of the scratch memory."""
        for run in self._runs:
            run()
        return tuple(tree_map(_copied, result) for result in self._results)


class RecordedProgram:
    """The instructions of one call of a function, to be replayed on other messages."""

    def __init__(
        self,
        function: Callable[..., Any],
        emitter: CommandEmitter,
        args: tuple[Any, ...],
    ) -> None:
        weights, frame, state = args
        self._state_leaves = list(leaves(state))
        self.weights = weights
        self.frame = empty(frame.shape, frame.dtype)
        with emitter.record() as recording:
            message = emitter.traced(self.frame)
            *results, after = function(weights, message, state)
            _copy_back(emitter, state, after)
        self.state = state
        self._recorded = RecordedSteps(recording, results, emitter.machine)

    @property
    def steps(self) -> Sequence[Step]:
        """The instructions and Python steps, fused."""
        return self._recorded.steps

    def matches(self, weights: Any, state: Any) -> bool:
        """Whether it was recorded for these weights and this state."""
        if weights is not self.weights:
            return False
        if state is self.state:
            return True
        given = list(leaves(state))
        if len(given) != len(self._state_leaves):
            return False
        return all(a is b for a, b in zip(given, self._state_leaves, strict=True))

    def __call__(self, frame: Any) -> tuple[Any, ...]:
        """Run it on a message; results are copies."""
        np.copyto(self.frame, frame)
        return (*self._recorded(), self.state)


class Program:
    """A function of (weights, message, state) that is recorded when first called."""

    def __init__(
        self,
        function: Callable[..., Any],
        emitter: CommandEmitter,
        recorded: OrderedDict[Program, RecordedProgram],
    ) -> None:
        self._function, self._emitter = function, emitter
        self._recorded = recorded

    def __call__(self, weights: Any, frame: Any, state: Any) -> tuple[Any, ...]:
        known = self._recorded.get(self)
        if known is None or not known.matches(weights, state):
            args = weights, frame, state
            known = RecordedProgram(self._function, self._emitter, args)
            self._recorded[self] = known
            if len(self._recorded) > MAX_PROGRAMS:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(self)
        return known(frame)


def _buffers(tree: Any) -> set[int]:
    """Numbers of the scratch buffers of the arrays in a tree."""
    arrays = [leaf for leaf in leaves(tree) if isinstance(leaf, np.ndarray)]
    return {handle.number for handle in map(handle_of, arrays) if handle is not None}


def _copied(leaf: Any) -> Any:
    return np.array(plain(leaf)) if isinstance(leaf, Tensor) else leaf


def _copy_back(emitter: CommandEmitter, before: Any, after: Any) -> None:
    """Copy state that was not updated in place back to its arrays."""
    for old, new in zip(leaves(before), leaves(after), strict=True):
        if new is not old:
            emitter.python(partial(np.copyto, old, plain(new)), [new])


def _segments(steps: list[Step], machine: Machine) -> Iterator[Callable[[], object]]:
    """One call for each run of native instructions, and the Python steps between."""
    for native, group in groupby(steps, lambda step: isinstance(step, Instruction)):
        if native:
            instructions = [step for step in group if isinstance(step, Instruction)]
            yield _native_call(instructions, machine)
        else:
            yield from (s.run for s in group if not isinstance(s, Instruction))


def _native_call(
    instructions: list[Instruction[Operand]], machine: Machine
) -> Callable[[], object]:
    encoded = b"".join(instruction.encoded() for instruction in instructions)
    buffer = ctypes.create_string_buffer(encoded)

    def run() -> None:
        machine.run(ctypes.addressof(buffer), len(instructions))

    return run
