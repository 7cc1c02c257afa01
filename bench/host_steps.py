"""Host time of a decoding step, with a runner that computes nothing.

    python bench/host_steps.py [--rows 8 32 512] [--calls 512] [--model MODEL.gguf]

Everything of the engine but the device: planning, writing and checking the frame,
settling, telling the answers and turning ids into text. Times are this thread's CPU
time, so that what else the machine does disturbs them less; the best of the rounds.
``--calls`` compares whole calls of that many requests: the core and the whole engine.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.dispatcher import RequestDispatcher
from inl.engine.frame_encoder import frames
from inl.engine.inference_engine import InferenceEngine
from inl.engine.request_handle import RequestHandle
from inl.executor.model_loader import LanguageModel, open_model
from inl.protocol.frame_check import FrameCheck
from inl.protocol.runner import Limits, Reply, Runner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import STEP

PROMPT = 16
ROUNDS = 5
STEPS = 200
VOCAB = 49152
STOPS = ["\n\nUser:", "<|done|>"]
WORDS = (260, 504, 3575, 282, 4649, 314)


class Instant(Runner):
    """Checks frames as a real runner does, and answers at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._check = FrameCheck(limits)
        self._steps: deque[tuple[int, int]] = deque()
        self._words = itertools.cycle(WORDS)

    def submit(self, message: Any) -> None:
        found = self._check.read(message)
        if found.kind == STEP:
            self._steps.append((found.step, found.bucket.rows))

    def sample(self, step: int, masks: Any) -> None:
        raise NotImplementedError

    def collect(self) -> Reply:
        step, rows = self._steps.popleft()
        tokens = np.full((rows, 1), next(self._words), np.int32)
        return Reply(step, tokens)

    def close(self) -> None:
        pass


def limits_for(rows: int) -> Limits:
    return Limits(
        slots=rows + 1, blocks=(rows * 128,), block_size=16, max_blocks_per_seq=128,
        vocab=VOCAB, depth=1,
    )  # fmt: skip


def request(number: int) -> Request:
    return Request([number % 1000 + 1] * PROMPT, max_tokens=STEPS * ROUNDS * 2)


def whole(rows: int, waiting: int, tokenizer: Any) -> Callable[[], object]:
    """A function that does one step of an engine in which all rows decode."""
    policy = SchedulerConfig(token_budget=rows * PROMPT, max_rows=rows)
    desk = RequestDispatcher(EngineCore(Instant(limits_for(rows)), policy))
    for number in range(rows + waiting):
        desk.submit(RequestHandle(request(number), tokenizer, (), 0.0))
    for _ in range(4):
        desk.step()
    return desk.step


def best(step: Callable[[], object]) -> float:
    """Milliseconds of one step."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(STEPS // 4):
            step()
        found.append((time.thread_time() - began) / (STEPS // 4))
    return 1e3 * min(found)


def parts(rows: int) -> dict[str, float]:
    """Milliseconds of what a step is made of."""
    limits = limits_for(rows)
    scheduler = Scheduler(
        limits, SchedulerConfig(token_budget=rows * PROMPT, max_rows=rows)
    )
    check = FrameCheck(limits)
    for number in range(rows):
        scheduler.add(request(number))
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = work()
        spent.setdefault(name, []).append(time.thread_time() - began)
        return result

    for _ in range(STEPS):
        plan = timed("plan", scheduler.plan)
        written = timed("frames", lambda plan=plan: frames(plan, limits))
        for each in written:
            timed("check", lambda each=each: check.read(each))
        timed("settle", lambda: scheduler.process_outputs([WORDS[0]] * rows))
    return {name: 1e3 * float(np.median(each)) for name, each in spent.items()}


def calls(count: int, model: LanguageModel) -> dict[str, float]:
    """Milliseconds of calls with ``count`` requests of 512 + 128 tokens."""
    limits = Limits(
        slots=count + 1, blocks=(count * 48 + 1,), block_size=16, max_blocks_per_seq=48,
        vocab=VOCAB, sampler="greedy",
    )  # fmt: skip
    config = EngineConfig(
        max_batch=count, token_budget=8192, context=768, sampling="greedy",
        prefix_cache=False,
    )  # fmt: skip
    engine = InferenceEngine(model, config=config, runner=Instant(limits))
    rng, options = np.random.default_rng(0), {"max_tokens": 128, "ignore_eos": True}

    def core(prompts: list[list[int]]) -> None:
        for prompt in prompts:
            engine.core.add(Request(prompt, **options))
        while engine.core.has_work:
            for event in engine.core.step():
                if event.error is not None:
                    raise event.error

    ways: dict[str, Callable[[list[list[int]]], object]] = {
        "core": core,
        "generate": partial(engine.generate, **options),
        "with two stop strings": partial(engine.generate, stop=STOPS, **options),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        prompts = rng.integers(3, VOCAB, (count, 512)).tolist()
        for name, way in ways.items():
            began = time.thread_time()
            way(prompts)
            spent[name].append(1e3 * (time.thread_time() - began))
    return {name: float(np.median(each[1:])) for name, each in spent.items()}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("--rows", type=int, nargs="+", default=[8, 32, 512])
    parse.add_argument("--model", help="GGUF file of the tokenizer (default model)")
    parse.add_argument("--calls", type=int, default=0, help="requests of a call")
    parse.add_argument("--profile", action="store_true", help="where the last went")
    found = parse.parse_args()
    model = open_model(resolve_model(found.model))
    tokenizer = model.checkpoint.tokenizer()
    out = sys.stdout.write
    out("rows   a step   with 100,000 waiting   of which\n")
    for rows in found.rows:
        few, many = (best(whole(rows, count, tokenizer)) for count in (0, 100_000))
        told = ", ".join(f"{name} {each:.3f}" for name, each in parts(rows).items())
        out(f"{rows:4} {few:8.3f} {many:8.3f} ms          {told}\n")
    if found.calls:
        told = (
            f"{name} {each:.0f}" for name, each in calls(found.calls, model).items()
        )
        out(f"{found.calls} requests of 512 + 128, ms: {', '.join(told)}\n")
    if found.profile:
        step = whole(found.rows[-1], 0, tokenizer)
        profile = cProfile.Profile()
        profile.runcall(lambda: [step() for _ in range(STEPS)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
