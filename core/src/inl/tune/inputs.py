"""Random inputs for an op call, from its specs."""

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
from inl.testing.float8_cases import float8_cache
from inl.testing.op_call import ROTATIONS

POOL = (1 << 20) - 3
"""Number of random values that large tensors repeat; odd, so that rows differ."""


class Inputs:
    """Generates float64 inputs from a seed, in the value range of half dtypes."""

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
        """Return random inputs for a call; decoding rows have ``length`` cached tokens.

        Raises :class:`~inl.errors.RequestError` if an argument is not a step, a cache,
        ``samples``, or a tree of float tensors.
        """
        steps = [arg for arg in args if isinstance(arg, Step)]
        step, blocks = self._step(steps[0], args, length) if steps else (None, 0)
        inputs: list[Any] = []
        for name, arg in zip(spec.parameters, args, strict=True):
            if isinstance(arg, Step):
                inputs.append(step)
            elif isinstance(arg, Cache):
                shape = (blocks, *arg.k.shape[1:])
                cache = Cache(self._numbers(shape), self._numbers(shape))
                float8 = arg.scales is not None
                inputs.append(float8_cache(cache) if float8 else cache)
            else:
                inputs.append(self._tensors(spec.name, name, arg))
        if steps:
            inputs = self._zero_padding(spec, inputs)
        return Case("tuning", tuple(inputs), dict(attrs))

    def _step(self, step: Step, args: tuple[Any, ...], length: int) -> tuple[Step, int]:
        tokens, rows = step.positions.shape[0], step.lengths.shape[0]
        size = next(arg.k.shape[1] for arg in args if isinstance(arg, Cache))
        length = min(length, step.blocks.shape[2] * size - 1)
        counts = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        cached = [length if count == 1 else 0 for count in counts]
        result, blocks = random_step(self._rng, cached, counts, block_size=size)
        # The block table has its full width: kernels divide their work by its capacity.
        missing = max(step.blocks.shape[2] - result.blocks.shape[2], 0)
        table = np.pad(result.blocks, ((0, 0), (0, 0), (0, missing)))
        return result._replace(blocks=table), blocks

    def _zero_padding(self, spec: OpSpec, inputs: list[Any]) -> list[Any]:
        """Zero the keys and values of padding, which share one cache slot."""
        used = next(int(arg.used_counts[2]) for arg in inputs if isinstance(arg, Step))
        for name, arg in zip(spec.parameters, inputs, strict=True):
            if name in ("k", "v"):
                arg[used:] = 0
        return inputs

    def _tensors(self, op: str, name: str, value: Any) -> Any:
        def tensor(leaf: StrictArray) -> Any:
            if "float" not in leaf.dtype:
                if name == "samples":
                    return np.arange(leaf.shape[0], dtype=np.int32)
                raise RequestError(
                    f"op {op}: {name} is {leaf!r}; accepted: a tree of float tensors"
                )
            if name in ROTATIONS:
                function = np.cos if name == "cos" else np.sin
                return function(np.arange(np.prod(leaf.shape)).reshape(leaf.shape) / 7)
            numbers = self._numbers(leaf.shape)
            if name == "w" and len(leaf.shape) > 1:
                return numbers / leaf.shape[-1] ** 0.5
            return 1 + 0.1 * numbers if name == "norm" else numbers

        return tree_map(tensor, value)

    def _numbers(self, shape: tuple[int, ...]) -> Any:
        start = int(self._rng.integers(POOL))
        return np.resize(np.roll(self._pool, -start), shape)
