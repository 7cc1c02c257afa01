"""The TPU plugin on an NVIDIA GPU through JAX's platform, beside inl-cuda.

    python bench/tpu_on_cuda.py speed [--models smollm2 8b]
    python bench/tpu_on_cuda.py oracle MODEL.gguf tests/data/smollm2-oracle.json
    python bench/tpu_on_cuda.py check

``speed`` decodes and prefills random weights in bfloat16 through the engine core, on
both plugins in turn, each in a process of its own. ``oracle`` and ``check`` exit with 1
where an answer or a check is wrong. ``--platform cpu --beside cpu:0`` tries the script
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DECODES, PREFILLS = (1, 8, 32), (512, 2048)
PROMPT, SKIPPED = 64, 16
"""Tokens of the prompts of decoding rows; tokens of each row before the clock starts.
"""
CONTEXT = 2304


@dataclass
class Engine:
    """A runner of random weights, and its vocabulary; serves the jobs of a parent."""

    runner: Any
    vocab: int
    tokens: int
    """Timed tokens of each decoding row."""

    def core(self, decode_steps: int) -> Any:
        """Return a fresh core; decode_steps: most steps of one program."""
        from inl.engine.core import EngineCore
        from inl.scheduling.plan import SchedulerConfig

        policy = SchedulerConfig(
            token_budget=self.runner.limits.token_budget, context=CONTEXT,
            prefix_cache=False, decode_steps=decode_steps,
        )  # fmt: skip
        return EngineCore(self.runner, policy)

    def finished(self, core: Any) -> list[tuple[float, int]]:
        """Run all requests; return the time of each step and its number of tokens."""
        seen = []
        while core.has_work:
            events = core.step()
            for event in events:
                if event.error is not None:
                    raise event.error
            count = sum(event.token is not None for event in events)
            seen.append((time.perf_counter(), count))
        return seen

    def ask(self, core: Any, rng: Any, length: int, tokens: int) -> None:
        from inl.scheduling.request import Request

        prompt = rng.integers(3, self.vocab, length).tolist()
        core.add(Request(prompt, max_tokens=tokens, ignore_eos=True))

    def decode(self, rng: Any, rows: int, decode_steps: int) -> float:
        """Milliseconds per token of each row."""
        core = self.core(min(decode_steps, self.runner.limits.decode_steps))
        for _ in range(rows):
            self.ask(core, rng, PROMPT, self.tokens + 2 * SKIPPED)
        first, last = rows * SKIPPED, rows * (SKIPPED + self.tokens)
        total, marks = 0, []
        for when, count in self.finished(core):
            total += count
            if first <= total <= last:
                marks.append((when, total))
        (began, before), (ended, after) = marks[0], marks[-1]
        return 1e3 * (ended - began) * rows / (after - before)

    def prefill(self, rng: Any, length: int) -> float:
        """Milliseconds from a prompt to its first token."""
        core = self.core(1)
        began = time.perf_counter()
        self.ask(core, rng, length, 1)
        seen = self.finished(core)
        return 1e3 * (next(when for when, count in seen if count) - began)


def serve(device: str, model: str, tokens: int, warm: bool) -> int:
    """Serve jobs such as ["decode", 8, 1]: a line of JSON for each line of input."""
    import numpy as np
    from random_models import random_language

    from inl import EngineConfig
    from inl.device import Device
    from inl.plugin import make_backend
    from inl.runners.local_runner import start_runner

    language = random_language(model, CONTEXT)
    shape = language.config
    per_token = 4 * shape.layers * shape.kv_heads * shape.head_dim
    rows = max(DECODES)
    room = CONTEXT + rows * (PROMPT + tokens + 4 * SKIPPED + 64)
    config = EngineConfig(
        backend=device, dtype="bfloat16", max_batch=rows, context=CONTEXT,
        token_budget=2048, sampling="greedy", cache_bytes=room * per_token,
        check_weights=False, warm_up=warm,
    )  # fmt: skip
    began = time.perf_counter()
    runner = start_runner(language, make_backend(Device(device)), config)
    language.checkpoint.close()
    engine = Engine(runner, shape.vocab_size, tokens)
    answer(time.perf_counter() - began)
    rng = np.random.default_rng(0)
    for line in sys.stdin:
        name, *words = json.loads(line)
        answer(getattr(engine, name)(rng, *words))
    runner.close()
    return 0


def answer(value: float) -> None:
    print(json.dumps({"value": value}), flush=True)


class Side:
    """A process that serves one device."""

    def __init__(self, device: str, given: argparse.Namespace, model: str) -> None:
        self.device = device
        command = [sys.executable, __file__, "serve", device, "--models", model,
                   "--tokens", str(given.tokens)]  # fmt: skip
        command += ["--warm"] if given.warm else []
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def value(self) -> float:
        """Wait for the next answer."""
        for line in self._process.stdout or ():
            if line.startswith('{"value"'):
                return float(json.loads(line)["value"])
        raise RuntimeError(f"{self.device}: ended with {self._process.wait()}")

    def run(self, *job: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self.value()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def speed(given: argparse.Namespace, model: str) -> None:
    """Measure both devices in interleaved rounds; print medians and ratios."""
    devices = ("tpu:0", given.beside)
    sides = [Side(device, given, model) for device in devices]
    try:
        for side in sides:
            print(f"{model} on {side.device}: started in {side.value():.1f} s")
        jobs = [("decode", rows, steps) for rows in DECODES for steps in (1, 8)]
        jobs += [("prefill", length) for length in PREFILLS]
        for job in jobs:
            compare_sides(sides, job, given.rounds)
    finally:
        for side in sides:
            side.close()


def compare_sides(sides: list[Side], job: tuple[Any, ...], rounds: int) -> None:
    warm = [side.run(*job) for side in sides]  # compiles what is missing
    found = [[side.run(*job) for side in sides] for _ in range(rounds)]
    mine, other = (statistics.median(column) for column in zip(*found, strict=True))
    ratios = [a / b for a, b in found]
    kind, size, *steps = job
    if kind == "decode":
        what = f"decode {size:2} rows, {steps[0]} steps a program, ms a token"
    else:
        what = f"prefill {size:4} tokens, ms to the first token"
    print(f"  {what}: {mine:.3f}, {sides[1].device} {other:.3f}, ratio "
          f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; "
          f"first {warm[0]:.1f}, {warm[1]:.1f})", flush=True)  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["speed", "oracle", "check", "serve"])
    parser.add_argument("words", nargs="*", help="files of the oracle")
    parser.add_argument("--models", nargs="+", default=["smollm2", "8b"])
    parser.add_argument("--platform", default="cuda", help="JAX platform")
    parser.add_argument("--beside", default="cuda:0", help="device to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--warm", action="store_true", help="compile all at the start")
    return parser.parse_args()


def main() -> int:
    given = parsed()
    os.environ.setdefault("INL_TPU_PLATFORM", given.platform)
    os.environ.setdefault("INL_PLUGINS", "inl_tpu.plugin,inl_cuda.plugin")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if given.action == "serve":
        return serve(given.words[0], given.models[0], given.tokens, given.warm)
    began = time.perf_counter()
    right = True
    if given.action == "speed":
        for model in given.models:
            speed(given, model)
    else:
        from oracle_answers import checks_pass, follows_oracle

        if given.action == "check":
            right = checks_pass("tpu:0")
        else:
            model, oracle = map(Path, given.words)
            right = follows_oracle(model, oracle, "tpu:0", "float32")
    verdict = "right" if right else "WRONG"
    print(f"{given.action}: {verdict}, {time.perf_counter() - began:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
