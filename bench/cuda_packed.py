"""Packed weights and INL dynamics on an NVIDIA GPU, beside what memory could do.

    python bench/cuda_packed.py [--only packed dynamics block]

Times are of one launch within a CUDA graph of many, over operands that take turns and
together are larger than the cache. The share is that of the rate of a large copy on
the device, measured in the same process: bytes that have to be read and written, over
the time. "bf16" is torch's own product with as many weights in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from inl.ops.inl import InlBlock
from inl_cuda.tuning import tuning
from inl_torch import functional as trained
from inl_torch.eager import inl
from inl_torch.triton import dynamics, packed_products
from inl_torch.triton.packed import FLOAT8, Packed, packed

PLACE = torch.device("cuda", 0)
PAST_CACHE = 256 << 20
"""Bytes that take turns."""

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
          (960, 576), (3072, 576), (576, 1536), (49152, 576))  # fmt: skip
KINDS = {
    "q4_1": (torch.uint8, 32, True),
    "q8_0": (torch.int8, 32, False),
    "int4 of 64": (torch.uint8, 64, False),
    "fp8 a row": (FLOAT8, 0, False),
}
TOKENS = (1, 4, 8, 16)


def microseconds(calls: list[Callable[[], Any]], rounds: int = 7) -> float:
    """Median over replays of a graph that makes every call, of the time of one."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(rounds + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(found[1:])


def copy_rate() -> float:
    """Bytes a microsecond that a copy reads and writes."""
    source = torch.ones(1 << 28, device=PLACE)
    target = torch.empty_like(source)
    calls = [lambda: target.copy_(source)] * 4
    return 2 * source.nbytes / host_microseconds(calls)


def matrix(kind: str, n: int, k: int) -> Packed:
    codes_type, group, has_offsets = KINDS[kind]
    scales = torch.rand(n, k // (group or k), device=PLACE).half() / 100
    if codes_type == FLOAT8:
        codes = torch.randn(n, k, device=PLACE).to(FLOAT8)
    else:
        codes = torch.randint(0, 16, (n, k), device=PLACE, dtype=codes_type)
    return packed(codes, scales, scales if has_offsets else None)


def held_bytes(w: Packed) -> int:
    return sum(part.nbytes for part in w if part is not None)


def copies(size: int) -> int:
    """How many operands of so many bytes go past the cache."""
    return min(max(PAST_CACHE // size, 2), 64)


def product_row(n: int, k: int, kinds: list[str], rate: float) -> None:
    cut = tuning(PLACE)
    plain = torch.randn(copies(2 * n * k), n, k, device=PLACE, dtype=torch.bfloat16)
    held = {}
    for kind in kinds:
        w = matrix(kind, n, k)
        held[kind] = [w] + [
            Packed(*(None if part is None else part.clone() for part in w))
            for _ in range(copies(held_bytes(w)) - 1)
        ]
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device=PLACE, dtype=torch.bfloat16)
        base = microseconds([partial(functional.linear, x, w) for w in plain] * 2)
        line = f"{n:6} x {k:5} {tokens:3} rows  bf16 {base:7.2f} us"
        for kind, matrices in held.items():
            calls = [partial(packed_products.times, x, w, None, cut) for w in matrices]
            took = microseconds(calls * 2)
            share = held_bytes(matrices[0]) / took / rate
            line += f" | {kind} {took:7.2f} ({share:4.0%}, {base / took:4.2f}x)"
        print(line, flush=True)


def dynamics_rows(rate: float) -> None:
    """A controlled step with clamps: forward, and both ways."""
    compiled = torch.compile(inl.inl_dynamics_step)
    clamps = {"dt": 0.1, "most_beta": 2.0, "limit": 10.0}
    for shape in ((1, 1, 4096), (64, 1, 4096), (8, 2048, 4096)):
        size = 2 * shape[0] * shape[1] * shape[2]
        sets = [operands(shape) for _ in range(min(copies(5 * size), 16))]
        ways = {
            "triton": dynamics.inl_dynamics_step,
            "eager": inl.inl_dynamics_step,
            "compile": compiled,
        }
        line = f"step {list(shape)}"
        for name, way in ways.items():
            took = microseconds([partial(way, *s, **clamps) for s in sets])
            line += f"  {name} {took:.2f} us ({7 * size / took / rate:.0%})"
        print(line, flush=True)
        backward_row(shape, sets, clamps, rate)


def operands(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    like: dict[str, Any] = {"device": PLACE, "dtype": torch.bfloat16}
    x, v = torch.randn(2, *shape, **like)
    controller = torch.randn(*shape[:-1], 3 * shape[-1], **like)
    return x, v, torch.randn(shape[-1], **like), controller


def backward_row(
    shape: tuple[int, ...], sets: list[Any], clamps: dict[str, Any], rate: float
) -> None:
    """Forward and backward with every gradient: ours, written in torch, and eager."""
    size = 2 * shape[0] * shape[1] * shape[2]

    def ours(x: Any, v: Any, mu: Any, controller: Any) -> Any:
        return trained.inl_dynamics_step(x, v, mu, controller, **clamps)

    def by_autograd(x: Any, v: Any, mu: Any, controller: Any) -> Any:
        a, b, g = controller.float().chunk(3, -1)
        b = functional.softplus(b).clamp(max=2.0)
        new = (a.sigmoid() * v.float() - b * (x.float() - mu.float())).clamp(-10, 10)
        return (x.float() + 0.1 * g.sigmoid() * new).to(x.dtype), new.to(x.dtype)

    ways = {
        "triton": ours,
        "autograd": by_autograd,
        "compile": torch.compile(by_autograd),
    }
    line = f"both {list(shape)}"
    for name, way in ways.items():

        def both(given: Any, way: Any = way) -> Any:
            leaves = [part.detach().requires_grad_() for part in given]
            moved, new = way(*leaves)
            return torch.autograd.grad((moved, new), leaves, (given[0], given[1]))

        took = host_microseconds([partial(both, s) for s in sets])
        # Forward 5 in, 2 out; backward 7 in, 5 out.
        line += f"  {name} {took:.2f} us ({19 * size / took / rate:.0%})"
    print(line, flush=True)


def host_microseconds(calls: list[Callable[[], Any]]) -> float:
    """Median time of a call with no graph, which autograd would not take."""
    for call in calls[:3]:
        call()
    found = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for call in calls:
            call()
        stop.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(found)


def block_rows(rate: float) -> None:
    """A model's layer of INL: controller, clamps and mu that moves."""
    like: dict[str, Any] = {"device": PLACE, "dtype": torch.bfloat16}
    ways = {"triton": dynamics.inl_block, "eager": inl.inl_block}
    for tokens, h, k in (
        (1, 4096, 64),
        (8, 4096, 64),
        (64, 4096, 64),
        (2048, 4096, 64),
    ):
        shapes = ((h,), (k, 2 * h), (k,), (3 * h, k), (3 * h,), (h, h))
        sets = [
            InlBlock(*(torch.randn(s, **like) / s[-1] ** 0.5 for s in shapes))
            for _ in range(8)
        ]
        x, v = torch.randn(2, tokens, h, **like)
        size = sum(part.nbytes for part in sets[0]) + 5 * x.nbytes
        line = f"block {tokens:4} x {h}"
        for name, way in ways.items():
            took = microseconds([partial(way, x, v, w, dt=0.1) for w in sets])
            line += f"  {name} {took:.2f} us ({size / took / rate:.0%})"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["packed", "dynamics", "block"])
    given = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copies run at {rate / 1e6:.2f} TB/s")
    with torch.no_grad():
        if "packed" in given.only:
            for n, k in SHAPES:
                product_row(n, k, list(KINDS), rate)
    if "dynamics" in given.only:
        dynamics_rows(rate)
    if "block" in given.only:
        with torch.no_grad():
            block_rows(rate)


if __name__ == "__main__":
    main()
