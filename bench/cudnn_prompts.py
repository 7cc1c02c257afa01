"""Attention of prompt chunks by cuDNN's graphs for lengths that the device knows.

    pip install nvidia-cudnn-frontend
    python bench/cudnn_prompts.py [--tokens 8192] [--prefixes 0 8192 24576]

Beside the kernel that the engine uses (cuDNN for the chunk, Triton for the prefix), for
heads as of the 8B shape: one causal call over keys that were copied to a dense buffer,
the copy included, and one over the blocks of the cache. Each is captured once, for the
longest prefix, and replayed for every prefix, as an engine must. Printed are
milliseconds, TFLOP/s and the relative error of some rows against float64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cudnn
import torch

from inl.spec.cache import Cache
from inl_torch.triton.attention.prompt import (
    KEYS,
    attend_prompt,
    gather_keys,
)

HEADS, KV_HEADS, DIM, SIZE = 32, 8, 128, 16
SCALE = DIM**-0.5
CHECKED = 16
"""Rows that are compared with float64."""


class Chunk:
    """Rotated queries, keys and values of a chunk, its cache, and where it begins.

    most: tokens of the longest prefix.
    """

    def __init__(self, tokens: int, most: int, place: str = "cuda") -> None:
        self.tokens, self.capacity = tokens, -(-(most + tokens) // KEYS) * KEYS
        blocks = self.capacity // SIZE
        cells = (blocks + 1, SIZE, KV_HEADS, DIM)
        draw = {"device": place, "dtype": torch.bfloat16}
        self.k_cache, self.v_cache = (torch.randn(cells, **draw) for _ in range(2))
        self.q = torch.randn(tokens, HEADS, DIM, **draw)
        order = torch.randperm(blocks, device=place) + 1
        self.table = order.to(torch.int32)
        self.begin = torch.zeros(1, dtype=torch.int32, device=place)
        self.lengths = torch.zeros(2, 1, 1, 1, 1, dtype=torch.int32, device=place)
        self.lengths[0] = tokens
        self.k = torch.empty(tokens, KV_HEADS, DIM, **draw)
        self.v = torch.empty_like(self.k)

    def move(self, prefix: int) -> None:
        """Let the chunk follow a prefix of this many tokens."""
        self.begin.fill_(prefix)
        self.lengths[1] = prefix + self.tokens
        keys, values = self.dense(prefix + self.tokens)
        self.k.copy_(keys[prefix:])
        self.v.copy_(values[prefix:])

    def dense(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first keys and values: [count, KV_HEADS, DIM]."""
        each = (x[self.table.long()] for x in (self.k_cache, self.v_cache))
        keys, values = (x.flatten(0, 1)[:count] for x in each)
        return keys, values

    def errors(self, out: torch.Tensor, prefix: int) -> float:
        """Relative error of some rows of [tokens, HEADS, DIM], the largest."""
        keys, values = (x.double() for x in self.dense(prefix + self.tokens))
        group, worst = HEADS // KV_HEADS, 0.0
        for row in torch.linspace(0, self.tokens - 1, CHECKED).long().tolist():
            seen = prefix + row + 1
            q = self.q[row].double().view(KV_HEADS, group, DIM)
            scores = torch.einsum("hgd,nhd->hgn", q, keys[:seen]) * SCALE
            right = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values[:seen])
            got = out[row].double().view_as(right)
            error = ((got - right).norm() / right.norm()).item()
            worst = max(worst, error if error == error else float("inf"))
        return worst


def engine_kernel(chunk: Chunk) -> Callable[[], torch.Tensor]:
    """The attention of the engine."""
    cache = Cache(chunk.k_cache, chunk.v_cache)
    starts = torch.tensor([0, chunk.tokens], dtype=torch.int32, device=chunk.q.device)
    step = SimpleNamespace(
        blocks=chunk.table[None, None], positions=chunk.begin, starts=starts
    )
    return lambda: attend_prompt(
        chunk.q, chunk.k, chunk.v, cache, step, scale=SCALE, group=0
    )


def sdpa(
    chunk: Chunk, handle: Any, keys: torch.Tensor, values: torch.Tensor,
    tables: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """One causal call; keys, values: [batch or blocks, heads, tokens, d]."""
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    q = chunk.q.transpose(0, 1).unsqueeze(0)
    out = torch.zeros_like(chunk.q)
    rows = out.transpose(0, 1).unsqueeze(0)
    of_q, of_keys = chunk.lengths
    given = {"q": q, "k": keys, "v": values, "seq_len_q": of_q, "seq_len_kv": of_keys}
    more: dict[str, Any] = {}
    if tables is not None:
        given |= {"paged_attention_k_table": tables, "paged_attention_v_table": tables}
        more["paged_attention_max_seq_len_kv"] = chunk.capacity
    inputs = {name: graph.tensor_like(each) for name, each in given.items()}
    result, _ = graph.sdpa(
        name="prompt", attn_scale=SCALE, generate_stats=False, use_padding_mask=True,
        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0, **inputs, **more,
    )  # fmt: skip
    result.set_output(True).set_dim(list(rows.shape)).set_stride(list(rows.stride()))
    graph.validate()
    if handle is None:
        return lambda: out
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    bound = {inputs[name]: each for name, each in given.items()} | {result: rows}
    space = torch.empty(
        max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=out.device
    )

    def run() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, space, handle=handle)
        return out

    return run


def dense_call(chunk: Chunk, handle: Any) -> Callable[[], torch.Tensor]:
    """Copy all keys to a dense buffer, then one call."""
    shape = (2, 1, KV_HEADS, chunk.capacity, DIM)
    keys, values = torch.zeros(shape, dtype=torch.bfloat16, device=chunk.q.device)
    call = sdpa(chunk, handle, keys, values, None)

    def run() -> torch.Tensor:
        gather_keys[(KV_HEADS, chunk.capacity // KEYS)](
            chunk.k_cache, chunk.v_cache, chunk.table, chunk.lengths[1], keys, values,
            0, chunk.capacity, SIZE=SIZE, KV_HEADS=KV_HEADS, DIM=DIM, KEYS=KEYS,
            num_warps=8,
        )  # fmt: skip
        return call()

    return run


def paged_call(chunk: Chunk, handle: Any) -> Callable[[], torch.Tensor]:
    """One call over the blocks of the cache."""
    keys, values = (x.transpose(1, 2) for x in (chunk.k_cache, chunk.v_cache))
    return sdpa(chunk, handle, keys, values, chunk.table[None, None, :, None])


def captured(run: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """Return a graph of ``run``, and its result."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def measured(graph: Any, rounds: int = 9) -> float:
    """Milliseconds of a replay, the median."""
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[0, 8192, 24_576])
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
          f"{cudnn.backend_version()}, frontend {cudnn.__version__}")  # fmt: skip
    chunk = Chunk(given.tokens, max(given.prefixes))
    handle = cudnn.create_handle()
    ways: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        "engine": lambda: engine_kernel(chunk),
        "cuDNN, copied": lambda: dense_call(chunk, handle),
        "cuDNN, blocks": lambda: paged_call(chunk, handle),
    }
    for name, make in ways.items():
        chunk.move(max(given.prefixes))
        try:
            graph, out = captured(make())
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        for prefix in given.prefixes:
            chunk.move(prefix)
            ms = measured(graph)
            pairs = given.tokens * (prefix + (given.tokens + 1) / 2)
            rate = 4 * pairs * HEADS * DIM / ms / 1e9
            print(f"{name}: {given.tokens:,} after {prefix:,}: {ms:.3f} ms, "
                  f"{rate:.0f} TFLOP/s, error {chunk.errors(out, prefix):.1e}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
