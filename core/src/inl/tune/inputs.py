"""Random inputs of a call, from the shapes that a model calls an op with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inl.errors import RequestError
from inl.ops.attention import random_step
from inl.spec.cache import Cache
from inl.spec.op import Case, OpSpec
from inl.spec.step import Step
from inl.spec.strict_array import StrictArray
from inl.spec.tree import tree_map
from inl.testing.kernel_site import ROTATIONS

POOL = (1 << 20) - 3
"""Random numbers that large tensors repeat; odd, so that no two rows are alike."""


class Inputs:
    """Makes tensors from one seed: float64, of the sizes that storage dtypes take."""

    def __init__(self, seed: Sequence[int]) -> None:
        self._rng = np.random.default_rng(list(seed))
        self._pool = self._rng.standard_normal(POOL)

    def case(
        self,
        spec: OpSpec,
        args: tuple[Any, ...],
        attrs: Mapping[str, Any],
        *,
        length: int,
    ) -> Case:
        """Make a case of a call on specs; each row has ``length`` tokens cached.

        Raises :class:`~inl.errors.RequestError` for an op whose inputs are not tensors
        of numbers, steps, caches and rows.
        """
        steps = [arg for arg in args if isinstance(arg, Step)]
        step, blocks = self._step(steps[0], args, length) if steps else (None, 0)
        made: list[Any] = []
        for name, arg in zip(spec.parameters, args, strict=True):
            if isinstance(arg, Step):
                made.append(step)
            elif isinstance(arg, Cache):
                shape = (blocks, *arg.k.shape[1:])
                made.append(Cache(self._numbers(shape), self._numbers(shape)))
            else:
                made.append(self._tensors(spec.name, name, arg))
        if steps:
            made = self._still_padding(spec, made)
        return Case("tuning", tuple(made), dict(attrs))

    def _step(self, step: Step, args: tuple[Any, ...], length: int) -> tuple[Step, int]:
        tokens, rows = step.positions.shape[0], step.lengths.shape[0]
        size = next(arg.k.shape[1] for arg in args if isinstance(arg, Cache))
        length = min(length, step.blocks.shape[2] * size - 1)
        counts = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        cached = [length if count == 1 else 0 for count in counts]
        made, blocks = random_step(self._rng, cached, counts, block_size=size)
        # As wide a table as is served: kernels split their work by what it can hold.
        more = max(step.blocks.shape[2] - made.blocks.shape[2], 0)
        table = np.pad(made.blocks, ((0, 0), (0, 0), (0, more)))
        return made._replace(blocks=table), blocks

    def _still_padding(self, spec: OpSpec, made: list[Any]) -> list[Any]:
        """Keep what padding writes alike: it goes to one cell, in any order."""
        used = next(int(arg.used_counts[2]) for arg in made if isinstance(arg, Step))
        for name, arg in zip(spec.parameters, made, strict=True):
            if name in ("k", "v"):
                arg[used:] = 0
        return made

    def _tensors(self, op: str, name: str, value: Any) -> Any:
        def tensor(leaf: StrictArray) -> Any:
            if "float" not in leaf.dtype:
                if name == "samples":
                    return np.arange(leaf.shape[0], dtype=np.int32)
                raise RequestError(
                    f"op {op}: {name} is {leaf!r}; accepted: floats, samples, steps"
                )
            if name in ROTATIONS:
                turn = np.cos if name == "cos" else np.sin
                return turn(np.arange(np.prod(leaf.shape)).reshape(leaf.shape) / 7)
            numbers = self._numbers(leaf.shape)
            if name == "w" and len(leaf.shape) > 1:
                return numbers / leaf.shape[-1] ** 0.5
            return 1 + 0.1 * numbers if name == "norm" else numbers

        return tree_map(tensor, value)

    def _numbers(self, shape: tuple[int, ...]) -> Any:
        start = int(self._rng.integers(POOL))
        return np.resize(np.roll(self._pool, -start), shape)
