"""Attention over a paged cache by OpenVINO's ``PagedAttentionExtension``, on CPUs.

The node reads keys and values through the block table and writes those of the step's
tokens in place, for rows of any number of tokens. Its inputs are those of OpenVINO
2026.4; they change between releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.op import _PagedAttentionExtension

from inl_intel.openvino.compiled import CompiledModel
from inl_intel.openvino.graph import Graph, Value

if TYPE_CHECKING:
    from inl.spec.cache import Paged, State
    from inl.spec.limits import Limits
    from inl.spec.step import Step
    from inl_intel.openvino.runtime import Runtime

BLOCK_SIZE: Final = 32
"""Tokens of a block of the CPU plugin's cache."""

KINDS: Final = {"i": np.int32, "f": np.float32, "u": np.uint8}

UNUSED: Final = (
    ("i", (0,)), ("i", (0,)), ("i", (0,)), ("f", (0,)), ("f", (0,)), ("i", ()),
    ("i", ()), ("f", (0, 0, 0, 0)), ("i", ()), ("i", (0,)), ("i", (0,)), ("i", (0,)),
    ("i", (0,)), ("u", (0,)), ("i", (0,)),
)  # fmt: skip
"""Dtype and shape of the inputs behind the context's length, which switch features off:
scores, rotation of the cache, sparse attention, sinks, eviction, types of tokens,
biases."""


def refuse(*_: Any, cap: float | None = None, **_attrs: Any) -> str | None:
    """Refuse a soft cap, which the node does not have."""
    if cap is not None:
        return "OpenVINO's paged attention has no soft cap of the scores"
    return None


class Pages:
    """Keys and values of one layer, allocated when a graph asks for them.

    Only a compiled graph knows their layout: [blocks, kv_heads, 32, head_dim], and the
    dtype.
    """

    def __init__(self, _group: Paged, blocks: int, _limits: Limits) -> None:
        self.blocks = blocks
        self._tensors: dict[str, Any] = {}

    def tensor(self, name: str, port: Any, runtime: Runtime) -> Any:
        """Return the tensor "k" or "v" for an input of a graph, zeroed at first.

        port: the input. Raises :class:`~inl.errors.OutOfMemory`.
        """
        sizes = [size.get_length() for size in list(port.get_partial_shape())[1:]]
        shape, kind = (self.blocks, *sizes), port.get_element_type()
        known = self._tensors.get(name)
        if known is None or tuple(known.shape) != shape or known.element_type != kind:
            known = self._tensors[name] = runtime.zeros(shape, kind)
        return known


class PagedGraph(Graph):
    """A graph for any number of tokens and rows."""

    def attend(
        self, q: Value, k: Value, v: Value, *, layer: int, group: int, scale: float,
        window: int | None, cap: float | None,  # noqa: ARG002
    ) -> Value:  # fmt: skip
        tokens, heads, _ = q.shape
        flat = [x.reshape(x.shape[0], -1).output for x in (q, k, v)]
        sizes = {"k": k.shape[1:], "v": v.shape[1:]}
        pages = [
            self.parameter(f"{name}.{layer}", ov.Type.dynamic, (-1, count, -1, -1))
            for name, (count, _) in sizes.items()
        ]
        names = "past_lens", "begins", f"blocks.{group}", f"block_begins.{group}"
        indices = [self.parameter(name, ov.Type.i32, (-1,)) for name in names]
        numbers = np.float32(scale), np.int32(window or 0), np.zeros(0, np.float32)
        unused = (np.zeros(shape, KINDS[kind]) for kind, shape in UNUSED)
        node = _PagedAttentionExtension([
            *flat, *pages, *indices, *(ops.constant(x).output(0) for x in numbers),
            self.parameter("context", ov.Type.i32, ()),
            *(ops.constant(x).output(0) for x in unused),
        ])  # fmt: skip
        info = node.get_rt_info()
        for name, (count, dim) in sizes.items():
            info[f"num_{name}_heads"], info[f"{name}_head_size"] = count, dim
        dim = sizes["v"][1]
        return q.made(node, (tokens, heads * dim)).reshape(tokens, heads, dim)


class PagedModel(CompiledModel):
    """A compiled :class:`PagedGraph`: padding is left out of a step."""

    _bound: Sequence[Any] = ()

    def inputs(self, step: Step, state: State, carry: dict[str, Any]) -> dict[str, Any]:
        self._bind(state.caches)
        tokens = int(step.used_counts[2])
        return feed(step) | {name: array[:tokens] for name, array in carry.items()}

    def finish(self, step: Step, state: State) -> None:
        """The node has written the caches."""

    def _bind(self, caches: Sequence[Pages]) -> None:
        """Make the caches inputs of the request, if they are not."""
        if len(caches) == len(self._bound) and all(
            a is b for a, b in zip(caches, self._bound, strict=True)
        ):
            return
        for index, pages in enumerate(caches):
            for name in "kv":
                whole = f"{name}.{index}"
                port = self.compiled.input(whole)
                self.request.set_tensor(whole, pages.tensor(name, port, self.runtime))
        self._bound = tuple(caches)


def feed(step: Step) -> dict[str, Any]:
    """Return the inputs of the graph for the tokens and rows that are not padding.

    Samples of padding rows are those of the last token.
    """
    _, rows, tokens = (int(count) for count in step.used_counts)
    begins = np.asarray(step.starts[: rows + 1], np.int32)
    lengths = step.lengths[:rows]
    inputs = {
        "positions": step.positions[:tokens],
        "samples": np.minimum(step.samples, tokens - 1),
        "begins": begins,
        "past_lens": lengths - (begins[1:] - begins[:-1]),
        "context": np.array(lengths.max(initial=0), np.int32),
    }
    counts = -(-lengths // BLOCK_SIZE)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    for group, table in enumerate(step.blocks):
        used = np.arange(table.shape[1]) < counts[:, None]
        inputs[f"blocks.{group}"] = table[:rows][used]
        inputs[f"block_begins.{group}"] = ends
    return inputs
