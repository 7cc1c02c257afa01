"""Times of methods to compute an expert layer in torch, and of a memory ceiling.

    python bench/moe.py [--device cuda] [--dtype bfloat16]

Each row is one number of tokens. Methods are timed alternately; the minimum of the
rounds counts. Bytes are those of the experts with tokens, read once. The ceiling is a
float32 matrix of as many bytes times a vector, measured in the same rounds; the number
in brackets is its time over the method's. "every" computes all experts for all tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from inl.ops.moe import Experts
from inl_torch.eager import moe

SHAPES = {"Mixtral / 4": (8, 2, 1024, 3584), "Qwen3-30B / 2": (128, 8, 1024, 384)}
"""Experts, experts per token, H and I, reduced to fit a small machine."""

TOKENS = (1, 4, 16, 64, 256)


def form(run: Callable[..., Any], every: int = 0) -> Callable[..., Any]:
    """The op ``experts`` with grouping by ``run``."""

    def compute(*args: Any) -> torch.Tensor:
        kept = moe._by_expert, moe.by_static_shapes, moe.DENSE_ROWS
        moe._by_expert = moe.by_static_shapes = run
        moe.DENSE_ROWS = every
        try:
            return moe.experts(*args, activation="silu")
        finally:
            moe._by_expert, moe.by_static_shapes, moe.DENSE_ROWS = kept

    return compute


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def inputs(sizes: tuple[int, ...], tokens: int, like: Any) -> tuple[Any, ...]:
    count, k, hidden, _ = sizes
    x = torch.randn(tokens, hidden, **like)
    logits = torch.randn(tokens, count, **like)
    ids, weights = moe.route(logits, k=k, kind="softmax_topk", renormalize=True)
    return x, ids, weights


def rows(name: str, like: dict[str, Any], rounds: int) -> None:
    count, _, hidden, inner = SHAPES[name]
    wide, narrow = (count, inner, hidden), (count, hidden, inner)
    w = Experts(*(torch.randn(s, **like) / s[-1] ** 0.5 for s in (wide, wide, narrow)))
    for tokens in TOKENS:
        args = inputs(SHAPES[name], tokens, like)
        read = 3 * len(args[1].unique()) * hidden * inner * w.gate.element_size()
        stream, ones = (
            torch.ones(size, device=like["device"])
            for size in ((read // 4096, 1024), 1024)
        )
        ways = {
            "ceiling": lambda stream=stream, ones=ones: torch.mv(stream, ones),
            "by expert": lambda args=args, run=moe._by_expert: form(run)(*args, w),
            "by block": lambda args=args, run=moe.by_static_shapes: form(run)(*args, w),
            "every": lambda args=args, run=moe.by_static_shapes: form(run, 512)(
                *args, w
            ),
        }
        if like["device"].type == "cuda":
            from inl_torch.triton.moe import experts

            ways["triton"] = lambda args=args, run=experts.experts: run(
                *args, w, activation="silu"
            )
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for way, run in ways.items():
                best[way] = min(best[way], seconds(run, like["device"]))
        ceiling = best.pop("ceiling")
        shown = "  ".join(
            f"{way} {1e3 * time:8.2f} ms ({ceiling / time:4.2f})"
            for way, time in best.items()
        )
        print(f"{name:14} {tokens:4} tokens {read >> 20:5} MiB  {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    like = {"device": torch.device(given.device), "dtype": getattr(torch, given.dtype)}
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in SHAPES:
            rows(name, like, given.rounds)


if __name__ == "__main__":
    main()
