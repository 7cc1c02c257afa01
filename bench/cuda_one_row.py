"""Times of the products of one row with weights of 8 and 4 bits, by launch parameters.

    python bench/cuda_one_row.py [--layers 8] [--kinds fp8 int4] [--all]

The four products of a layer of the 8B shape, random, with norms and activation as in a
model, in a graph of different layers in which each launch depends on the previous one.
Prints microseconds of a layer, and in brackets the share of the copy bandwidth, of the
CUDA kernels and of those of Triton. ``--all`` tries other launch parameters.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from cuda_steps import copy_rate

from inl.ops.norm import Norm
from inl_cuda.one_row.products import Launch, OneRowProducts
from inl_cuda.one_row.stored import OneRowFirst
from inl_cuda.tuning import tuning
from inl_torch.eager.mlp import StackedMlp
from inl_torch.triton.float8.products import Products as Float8Products
from inl_torch.triton.float8.weights import Float8
from inl_torch.triton.int4.products import Products as Int4Products
from inl_torch.triton.int4.weights import Int4

EPS = 1e-5
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096),
          "down": (4096, 14336)}  # fmt: skip


def float8(n: int, k: int) -> Float8:
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    return Float8(codes, torch.rand(n, device="cuda") * 0.01 + 0.01)


def int4(n: int, k: int) -> Int4:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, k // 128, device="cuda") * 0.01 + 0.005).half()
    return Int4(codes, scales, -8 * scales)


KINDS = {"fp8": (float8, Float8Products), "int4": (int4, Int4Products)}


def timed(run: Callable[[], None]) -> float:
    """Median microseconds of a graph of ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(7):
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 20)
    return statistics.median(times)


def layer_time(products: Any, layers: list[dict[str, Any]]) -> float:
    """Microseconds of a layer."""
    norm = Norm(torch.ones(4096, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        y = x
        for w in layers:
            r, y = products.norm_product(y, x, norm, EPS, w["qkv"], None)
            y = products.product(y[:, :4096], w["o"], None)
            mlp = StackedMlp(w["gate_up"], w["down"])
            y = products.norm_mlp(r, y, norm, EPS, mlp, "silu")[1]

    return timed(run) / len(layers)


def launches() -> list[Launch]:
    """Other launch parameters."""
    several = [
        Launch(512, 1, *each) for each in product((1, 2), (1, 2, 3, 4, 6), (1, 2))
    ]
    return [*several, Launch(1024, 1, 1, 1, 1), Launch(1024, 1, 1, 2, 2),
            Launch(256, 2, 2, 4, 2), Launch(256, 1, 1, 6, 3)]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    params, rate = tuning(torch.device("cuda", 0)), copy_rate()
    print(f"{torch.cuda.get_device_name()}, copies {rate / 1e12:.2f} TB/s")
    for kind in given.kinds:
        make, triton = KINDS[kind]
        layers = [{part: make(*size) for part, size in SHAPES.items()}
                  for _ in range(given.layers)]  # fmt: skip
        size = sum(field.nbytes for w in layers[0].values() for field in w)
        products = triton(params)
        ways = {"Triton": products}
        for shape in (None, *(launches() if given.all else ())):
            one_row = OneRowProducts(params.processors, shape)
            ways[f"CUDA, {shape or 'default'}"] = OneRowFirst(
                products, one_row, is_int4=kind == "int4", pdl=params.uses_pdl(1)
            )
        for label, way in ways.items():
            us = layer_time(way, layers)
            share = size / rate * 1e6 / us
            print(f"{kind}: {us:6.1f} us ({share:.0%}), {label}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
