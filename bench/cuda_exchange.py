"""Time of one all-reduce over the GPUs of a host in a CUDA graph, by three methods.

    python bench/cuda_exchange.py --ranks 2

"ours" is inl_torch.collectives, "gather" its method without mapped memory, and
"library" NCCL's all-reduce of a copy. Also prints the error of "ours" from the exact
sum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import distributed, multiprocessing

from inl.backend.collectives import Rank
from inl.backend.rank_sockets import reserve_address
from inl_torch.collectives import ProcessCollectives

CHAIN = 64
"""Exchanges in a graph, each of the previous result."""


def microseconds(step: Callable[[Any], Any], x: Any) -> float:
    """Microseconds per exchange, by events around replays of a chain."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(CHAIN):
            y = step(y)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 5 / CHAIN)
    return statistics.median(times[2:])


def serve(number: int, ranks: int, address: str) -> None:
    place = torch.device("cuda", number)
    torch.cuda.set_device(place)
    ours = ProcessCollectives(Rank(number, ranks, address, 60.0), place)

    def library(x: Any) -> Any:
        y = x.clone()
        distributed.all_reduce(y)
        return y

    def gather(x: Any) -> Any:
        return reduce(torch.add, ours._gathered(x, "tensor").unbind(0))

    ways = {
        "ours": lambda x: ours.all_reduce(x, "tensor"), "gather": gather,
        "library": library,
    }  # fmt: skip
    for shape in ((1, 4096), (8, 4096), (32, 4096), (64, 4096), (2048, 4096)):
        torch.manual_seed(7)
        parts = torch.randn((ranks, *shape), dtype=torch.bfloat16, device=place)
        exact = parts.double().sum(0)
        found = ours.all_reduce(parts[number], "tensor").double()
        apart = float((found - exact).abs().max() / exact.abs().max())
        times = [
            f"{name} {microseconds(way, parts[number] * 1e-30):.1f}"
            for name, way in ways.items()
        ]
        if number == 0:
            print(f"{list(shape)} bfloat16, us: {', '.join(times)}; off by {apart:.1e}",
                  flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    address, reserved = reserve_address()
    with reserved:
        multiprocessing.spawn(serve, (given.ranks, address), nprocs=given.ranks)


if __name__ == "__main__":
    main()
