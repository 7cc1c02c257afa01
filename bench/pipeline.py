"""Run a model in pipeline stages, and measure the bubble of each schedule.

Each rank is a process; every stage waits the same time in its forward and in its
backward pass, as a stage of a large model computes, so that the idle share is the
schedule's. Prints, for each schedule, the bubble by ``pipeline_bubble``, that of
the shortest of three steps of SGD in float64, and the largest difference of losses to
one device. Exits with 1 if losses differ by more than 1e-9.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn

from inl.optimizers import (
    apply_parallelism,
    get_optimal_parallelism,
    pipeline_bubble,
)

WIDTH, RATE, STEPS, CHUNKS = 16, 0.1, 3, 2


class Waiting(torch.autograd.Function):
    """Wait in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        wait(seconds, x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        wait(ctx.seconds, gradients[0].device)
        return gradients[0], None


def wait(seconds: float, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    time.sleep(seconds)


class Member(nn.Module):
    """A layer of a stage that takes ``seconds`` in each pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = Waiting.apply(torch.tanh(self.linear(x)), self.seconds)
        return waited


def network(members: int, seconds: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Member(seconds) for _ in range(members))).double()


def batches(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [
        (torch.randn(size, WIDTH).double(), torch.randn(size, WIDTH).double())
        for _ in range(STEPS)
    ]


def losses(step: Any, parameters: Any, size: int, device: Any) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    found = []
    for x, y in batches(size):
        optimizer.zero_grad()
        loss = step(x.to(device), y.to(device))
        optimizer.step()
        found.append(float("nan") if loss is None else float(loss))
    return found


def rank_main(rank: int, words: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    if words.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if words.device == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=words.ranks
    )
    place = f"cuda:{rank}" if words.device == "cuda" else "cpu"
    plan = replace(
        get_optimal_parallelism(
            model_size_params=10**6, num_devices=1, memory_per_device_gb=10
        ),
        pipeline_parallel=words.ranks,
    )
    mse, size = nn.functional.mse_loss, 2 * words.micro_batches
    members = CHUNKS * words.ranks
    one = network(members, 0)

    def alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse(one(x), y)
        loss.backward()
        return loss.detach()

    want = losses(alone, one.parameters(), size, "cpu")
    bad = False
    for kind in ("gpipe", "1f1b", "interleaved"):
        seconds = words.milliseconds / 1e3 / CHUNKS
        found = apply_parallelism(
            network(members, seconds), plan, loss=mse, schedule=kind, chunks=CHUNKS,
            micro_batches=words.micro_batches,
        )  # fmt: skip
        times: list[float] = []

        def timed(x: torch.Tensor, y: torch.Tensor, f: Any = found) -> Any:
            distributed.barrier()
            start = time.perf_counter()
            loss = f.step(x, y)
            distributed.barrier()
            times.append(time.perf_counter() - start)  # noqa: B023 - called here
            return loss

        got = losses(timed, found.parameters(), size, place)
        took = min(times)
        busy = 2 * words.micro_batches * words.milliseconds / 1e3
        bubble = pipeline_bubble(
            words.ranks, words.micro_batches, CHUNKS if kind == "interleaved" else 1
        )
        if found.last:
            off = max(abs(a - b) for a, b in zip(got, want, strict=True))
            bad = bad or not off < 1e-9
            print(
                f"{kind:12} bubble {bubble:.3f} by formula, "
                f"{1 - busy / took:.3f} measured; losses off by {off:.1e}",
                flush=True,
            )
    distributed.destroy_process_group()
    os._exit(1 if bad else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=200, help="of a stage")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    words = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        run = partial(rank_main, words=words, store=str(Path(folder) / "store"))
        ranks = [context.Process(target=run, args=(i,)) for i in range(words.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
