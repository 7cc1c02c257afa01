"""Attention over keys that the host gathers, for devices without paged attention.

The cache is in host memory. Every input of the graph has a static shape: each row's
cached keys and values, those of the step's tokens, and a mask. The graph returns the
new keys and values, which the host writes to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from inl_intel.openvino.compiled import CompiledModel
from inl_intel.openvino.graph import Graph, Value

if TYPE_CHECKING:
    from inl.spec.cache import Paged, State
    from inl.spec.limits import Limits
    from inl.spec.step import Step
    from inl_intel.openvino.runtime import Runtime

BLOCK_SIZE: Final = 32

MASKED: Final = np.float32(-6e4)
"""Added to the score of a key that a token does not see: a number of float16."""


class Pages:
    """Keys and values of one layer: float32 [blocks, block_size, kv_heads, dim]."""

    def __init__(self, group: Paged, blocks: int, limits: Limits) -> None:
        shape = blocks, limits.block_size, group.kv_heads, group.head_dim
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)


class GatheredGraph(Graph):
    """A graph for one number of tokens, rows and cached keys per row.

    step: arrays of these shapes. keys: cached keys of a step, of all its rows.
    """

    fixed = True

    def __init__(self, step: Step) -> None:
        super().__init__()
        _, rows, columns = step.blocks.shape
        self.keys = rows * columns * BLOCK_SIZE
        self.groups: dict[int, int] = {}
        """Layer -> its cache group."""
        self.windows: dict[int, str] = {}
        """Window, or 0 -> name of its mask."""

    def attend(
        self, q: Value, k: Value, v: Value, *, layer: int, group: int, scale: float,
        window: int | None, cap: float | None,
    ) -> Value:  # fmt: skip
        tokens, heads, _ = q.shape
        parts = []
        for name, new in (("k", k), ("v", v)):
            shape = self.keys, *new.shape[1:]
            past = self.parameter(f"{name}.{layer}", ov.Type.f32, shape)
            self.results.append(new.output)
            parts.append(by_head(ops.concat([past, new.output], 0), heads))
        keys, values = parts
        seen = f"mask.{window or 0}"
        self.groups[layer] = group
        self.windows[window or 0] = seen
        mask = self.parameter(seen, ov.Type.f32, (tokens, self.keys + tokens))
        query = ops.multiply(by_head(q.output, heads), ops.constant(np.float32(scale)))
        scores = ops.matmul(query, keys, False, True)
        if cap is not None:
            scaled = ops.divide(scores, ops.constant(np.float32(cap)))
            scores = ops.multiply(ops.tanh(scaled), ops.constant(np.float32(cap)))
        weights = ops.softmax(ops.add(scores, mask), -1)
        out = ops.transpose(ops.matmul(weights, values, False, False), axes(1, 0, 2))
        return q.made(out, (tokens, heads, v.shape[2]))


def by_head(x: Any, heads: int) -> Any:
    """Return [T, kv_heads, dim] as [heads, T, dim], each head for its query heads."""
    x = ops.transpose(x, axes(1, 0, 2))
    count, length, dim = x.output(0).get_shape()
    if count == heads:
        return x
    shape = np.array([count, heads // count, length, dim])
    wide = ops.broadcast(ops.unsqueeze(x, axes(1)), ops.constant(shape))
    return ops.reshape(wide, ops.constant(np.array([heads, length, dim])), False)


def axes(*numbers: int) -> Any:
    """Return a constant of axes."""
    return ops.constant(np.array(numbers))


class GatheredModel(CompiledModel):
    """A compiled :class:`GatheredGraph`."""

    def __init__(self, graph: GatheredGraph, logits: Value, runtime: Runtime) -> None:
        super().__init__(graph, logits, runtime)
        self._windows = dict(graph.windows)
        self._layers = [int(n[2:]) for n in graph.inputs if n.startswith("k.")]
        self._groups: dict[int, int] = graph.groups

    def inputs(self, step: Step, state: State, carry: dict[str, Any]) -> dict[str, Any]:
        found = carry | {"positions": step.positions, "samples": step.samples}
        for layer in self._layers:
            pages, table = state.caches[layer], step.blocks[self._groups[layer]]
            for name in "kv":
                array = getattr(pages, name)[table]
                found[f"{name}.{layer}"] = array.reshape(-1, *array.shape[3:])
        for window, name in self._windows.items():
            found[name] = mask(step, window)
        return found

    def finish(self, step: Step, state: State) -> None:
        """Write the new keys and values to the cells of their tokens."""
        number = 1
        for layer in self._layers:
            cells = step.writes[self._groups[layer]]
            for name in "kv":
                pages = getattr(state.caches[layer], name)
                new = self.request.get_output_tensor(number).data
                pages.reshape(-1, *pages.shape[2:])[cells] = new
                number += 1


def mask(step: Step, window: int) -> Any:
    """Return what is added to the scores of a step, float32 [T, R * C + T].

    Keys are the C cells of each row's block table, then the tokens of the step. window:
    tokens that a query sees, its own included; 0 is all.
    """
    rows, columns = step.blocks.shape[1:]
    used = np.arange(len(step.tokens)) < step.used_counts[2]
    past = step.lengths - np.diff(step.starts)
    cells = np.arange(columns * BLOCK_SIZE)
    owner = np.concatenate([np.repeat(np.arange(rows), cells.size), step.rows])
    place = np.concatenate([np.tile(cells, rows), step.positions])
    valid = np.concatenate([(cells < past[:, None]).reshape(-1), used])
    distance = step.positions[:, None] - place
    seen = valid & (owner == step.rows[:, None]) & (distance >= 0)
    if window:
        seen &= distance < window
    return np.where(seen, np.float32(0), MASKED)
