"""Attention of a step of one row by one call of cuDNN, whose lengths the device knows.

torch's call of cuDNN takes lengths of the host, so that a captured graph could attend
to no prefix with it. cuDNN's own graphs read them on the device: keys of the row are
copied from the blocks of the cache to a dense buffer, and one causal call, aligned with
the last key, attends to all of them. Needs the package nvidia-cudnn-frontend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from inl.spec.kernel import Kernel
from inl_torch.triton.attention.cache import write_kv
from inl_torch.triton.attention.prompt import (
    KEYS,
    clear_rows,
    gather_keys,
    refuse_prompt,
)
from inl_torch.triton.attention.rope import rope
from inl_torch.triton.common import PREFERENCE, dense

if TYPE_CHECKING:
    from inl.spec.cache import Cache
    from inl.spec.step import Step

LOGGER = logging.getLogger(__name__)

MOST_BYTES: Final = 1 << 30
"""Most bytes of the buffer of keys and values: 262,144 keys of 8 heads of 128."""

LEAST_CUDNN: Final = 90_500
"""Least version of cuDNN."""


class Operands(NamedTuple):
    """What a call reads; ``batch`` is 1."""

    q: torch.Tensor
    """[1, heads, T, d]."""
    k: torch.Tensor
    """[1, kv_heads, capacity, d]."""
    v: torch.Tensor
    """[1, kv_heads, capacity, d]."""
    seq_len_q: torch.Tensor
    """int32 [1, 1, 1, 1]: queries that are no padding."""
    seq_len_kv: torch.Tensor
    """int32 [1, 1, 1, 1]: keys; the last one is of the last query."""


class Graphs:
    """Built graphs of cuDNN by the shapes of their operands. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._handles: dict[int, Any] = {}
        self._built: dict[tuple[Any, ...], Any] = {}

    def attend(self, given: Operands, out: torch.Tensor, scale: float) -> None:
        """Write the attention to ``out`` [1, heads, T, d]; padding is undefined.

        Called within a capture, it is captured.
        """
        cudnn = import_module("cudnn")
        device = given.q.device.index or 0
        shapes = tuple((x.shape, x.stride()) for x in (*given, out))
        key = (device, scale, shapes)
        with self._lock:
            if device not in self._handles:
                self._handles[device] = cudnn.create_handle()
            handle = self._handles[device]
            if key not in self._built:
                self._built[key] = build(given, out, scale, handle)
            graph, inputs, result = self._built[key]
            stream = torch.cuda.current_stream(device).cuda_stream
            cudnn.set_stream(handle=handle, stream=stream)
            size = max(graph.get_workspace_size(), 1)
            space = torch.empty(size, dtype=torch.uint8, device=given.q.device)
            bound = dict(zip(inputs, given, strict=True)) | {result: out}
            graph.execute(bound, space, handle=handle)


def build(given: Operands, out: torch.Tensor, scale: float, handle: Any) -> Any:
    """Return a graph for such operands, its inputs in their order, and its output."""
    cudnn = import_module("cudnn")
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    inputs = {name: graph.tensor_like(each) for name, each in given._asdict().items()}
    result, _ = graph.sdpa(
        name="prompt", attn_scale=scale, generate_stats=False, use_padding_mask=True,
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0, **inputs,
    )  # fmt: skip
    result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, tuple(inputs.values()), result


def attend_row(
    q: torch.Tensor, cache: Cache, step: Step, graphs: Graphs, *, scale: float,
    group: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of the tokens of one row, whose keys the cache has: [T, heads, d].

    q: rotated.
    """
    (tokens, heads, dim), (size, kv_heads) = q.shape, cache.k.shape[1:3]
    table = step.blocks[group].contiguous()
    capacity = key_capacity(table.shape[1], size)
    used = (step.starts[1:2] - step.starts[:1]).to(torch.int32)
    total = step.lengths[:1].to(torch.int32)
    shape = (2, 1, kv_heads, capacity, dim)
    keys, values = torch.empty(shape, dtype=q.dtype, device=q.device)
    gather_keys[(kv_heads, capacity // KEYS)](
        cache.k, cache.v, table, total, keys, values, 0, capacity, SIZE=size,
        KV_HEADS=kv_heads, DIM=dim, KEYS=KEYS, num_warps=8,
    )  # fmt: skip
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    queries, results = (x.unsqueeze(0).transpose(1, 2) for x in (dense(q), out))
    counts = (each.view(1, 1, 1, 1) for each in (used, total))
    graphs.attend(Operands(queries, keys, values, *counts), results, scale)
    clear_rows(out.view(tokens, heads * dim), used)
    return out


def key_capacity(blocks: int, size: int) -> int:
    """Return the keys of the buffer of a row of blocks."""
    return -(-blocks * size // KEYS) * KEYS


def rope_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: Cache, step: Step, *, scale: float,
    window: int | None = None, cap: float | None = None,  # noqa: ARG001 - refused
    group: int = 0, graphs: Graphs,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """Rotate, write to the cache and attend to all keys of the row in one call."""
    q, k = rope(q, k, cos, sin)
    cache = write_kv(k, v, cache, step.writes[group])
    return attend_row(q, cache, step, graphs, scale=scale, group=group), cache


def refuse(*args: Any, **attrs: Any) -> str | None:
    """Return why one call does not compute this attention, if it does not."""
    if reason := refuse_prompt(*args, **attrs):
        return reason
    cache, step = args[5:7]
    size, kv_heads, dim = cache.k.shape[1:]
    capacity = key_capacity(step.blocks.shape[2], size)
    if 4 * kv_heads * capacity * dim > MOST_BYTES:
        return f"takes rows whose keys and values are {MOST_BYTES} bytes at most"
    return None


def kernels() -> Iterable[Kernel]:
    """Return the kernel, if the package is installed and finds cuDNN."""
    if can_build():
        yield Kernel(
            "rope_attend",
            "triton+cudnn_row",
            partial(rope_attend, graphs=Graphs()),
            refuse=refuse,
            preference=PREFERENCE + 4,
        )


@cache
def can_build(find: Callable[[str], Any] = find_spec) -> bool:
    """Whether cuDNN's graphs can be built; warns once if their package is broken."""
    if find("cudnn") is None:
        return False
    try:
        version = import_module("cudnn").backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        LOGGER.warning(
            "prompts use torch's call of cuDNN, and Triton for their prefix: "
            "nvidia-cudnn-frontend: %s",
            error,
        )
        return False
    return int(version) >= LEAST_CUDNN
