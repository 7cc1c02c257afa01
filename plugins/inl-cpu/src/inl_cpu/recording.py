"""Recording of a program: native instructions and Python steps, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from inl_cpu.encoding import Datum, Instruction, Operand
from inl_cpu.memory import BufferPlanner, Scratch, handle_of


@dataclass(frozen=True, slots=True)
class PythonStep:
    """A NumPy computation between native instructions."""

    run: Callable[[], object]
    inputs: frozenset[int]
    """Numbers of the scratch buffers that it reads."""

    def reads(self) -> frozenset[int]:
        """Numbers of the scratch buffers that it reads."""
        return self.inputs


Step = Instruction[Operand] | PythonStep


class Recording:
    """Collects the steps of a program and the memory that they use."""

    def __init__(self, scratch: Scratch) -> None:
        self.buffers = BufferPlanner(scratch)
        self.steps: list[Step] = []
        self.references: list[Any] = []
        """Objects that must live as long as the program."""

    def add_instruction(self, instruction: Instruction[Datum]) -> None:
        """Add an instruction; operands outside the scratch memory are kept alive."""
        resolved = instruction.resolved()
        self.steps.append(resolved)
        self.references += [
            datum
            for field, datum in instruction.operands()
            if not getattr(resolved, field.name).buffer
        ]

    def add_python(
        self, run: Callable[[], object], inputs: Sequence[NDArray[Any]]
    ) -> None:
        """Add a step that calls ``run``, which reads ``inputs``."""
        handles = [handle_of(array) for array in inputs]
        numbers = frozenset(handle.number for handle in handles if handle is not None)
        self.steps.append(PythonStep(run, numbers))
