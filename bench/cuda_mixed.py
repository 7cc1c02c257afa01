"""Attention of one layer of steps with a long chunk beside decoding rows.

    python bench/cuda_mixed.py --chunk 8192 --prefix 0 8192 24576 --rows 0 3 31

"paged" computes all rows over the blocks of the cache, "apart" the chunk over gathered
keys; "library" is the method of steps of one row alone. Each is captured in a graph,
whose lists of work are made before. Rates count the operations of visible keys. Exits
with 1 where a method differs from "paged" by more than rounding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda_serve import products_rate
from cuda_steps import copy_rate

from inl.device import Device
from inl.ops.attention import random_step
from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_cuda.backend import CudaBackend
from inl_torch.triton.attention.attention import paged_attention
from inl_torch.triton.attention.plan import Work
from inl_torch.triton.attention.prompt import attend_prompt, refuse_prompt
from inl_torch.triton.tuning import Tuning

BLOCK = 16
CALLS, REPLAYS = 4, 9
"""Calls in a graph, and its replays."""

WRONG = 0.02
"""Relative distance beyond that of bfloat16 rounding."""


class Load(NamedTuple):
    """Operands of one layer, and the operations of its visible keys."""

    q: torch.Tensor
    cache: Cache
    step: Step
    flops: int


def make(given: argparse.Namespace, prefix: int, rows: int) -> Load:
    """Make a step of ``chunk`` tokens: those of ``rows`` rows, the rest of a prompt."""
    new, (heads, kv_heads, dim) = given.chunk - rows, given.heads
    host, blocks = random_step(
        np.random.default_rng(0), [*[given.cached] * rows, prefix], [*[1] * rows, new],
        block_size=BLOCK, pad_rows=max(given.sequences - rows - 1, 0) if rows else 0,
    )  # fmt: skip
    step = Step(*(torch.from_numpy(np.asarray(a)).cuda() for a in host[:-1]))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    dtype = torch.float8_e4m3fn if given.float8 else torch.bfloat16
    scales = torch.full((2,), 0.5, device="cuda") if given.float8 else None
    cache = Cache(
        *(normal(blocks, BLOCK, kv_heads, dim).to(dtype) for _ in range(2)), scales
    )
    keys = new * prefix + new * (new + 1) // 2 + rows * (given.cached + 1)
    q = normal(given.chunk, heads, dim)
    return Load(q, cache, step, 4 * heads * dim * keys)


Methods = dict[str, Callable[[], torch.Tensor]]


def methods(load: Load, tuning: Tuning) -> Methods:
    """Attention by each method that takes the load, "paged" first."""
    (q, cache, step, _), work = load, Work(load.step)
    scale = q.shape[2] ** -0.5

    def attend(fewest: int) -> torch.Tensor:
        return paged_attention(
            q, cache, step, work, scale=scale, window=None, cap=None, group=0,
            tuning=replace(tuning, long_row_tokens=fewest), gathers=fewest > 0,
        )  # fmt: skip

    found: Methods = {
        "paged": partial(attend, 0), "apart": partial(attend, tuning.long_row_tokens)
    }  # fmt: skip
    if not refuse_prompt(q, None, None, None, None, cache, step):
        k, v = (x.flatten(0, 1)[step.writes[0].long()] for x in cache[:2])
        found["library"] = partial(
            attend_prompt, q, k, v, cache, step, scale=scale, group=0
        )
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    """Time one call by the median of replays of a graph."""
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of the step")
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 8192, 24576])
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 3, 31])
    parser.add_argument("--cached", type=int, default=32000, help="keys of such a row")
    parser.add_argument("--sequences", type=int, default=512, help="rows and padding")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128])
    parser.add_argument("--float8", action="store_true", help="cache in float8")
    given = parser.parse_args()
    copies, products = copy_rate(), products_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ceilings: "
          f"copies {copies / 1e12:.2f} TB/s, products {products / 1e12:.0f} TFLOP/s\n"
          "prefix | rows | method | ms | TFLOP/s | distance", flush=True)  # fmt: skip
    tuning = CudaBackend(Device("cuda:0")).tuning()
    wrong = False
    for prefix in given.prefix:
        for rows in given.rows:
            load = make(given, prefix, rows)
            paged = None
            for name, call in methods(load, tuning).items():
                out = call().float()
                paged = out if paged is None else paged
                distance = float((out - paged).norm() / paged.norm())
                wrong |= not distance <= WRONG
                taken = milliseconds(call)
                print(f"{prefix} | {rows} | {name} | {taken:.3f} | "
                      f"{load.flops / taken / 1e9:.0f} | {distance:.4f}",
                      flush=True)  # fmt: skip
            del load, paged, call, out
            torch.cuda.empty_cache()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
