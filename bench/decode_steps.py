"""Compare repeated steps with single ones: tokens per second, and host time per token.

Usage: python bench/decode_steps.py [--device tpu:0] [--steps 1 4 8] [--rows 1 8]

INL_TPU_PLATFORM=cpu runs JAX's programs on the CPU. The host time is what the engine
takes beside waiting for tokens; on a device of its own it is hidden by steps in flight
as long as it is shorter than they are. The outputs of all runs are compared.
"""

from __future__ import annotations

import argparse
from time import perf_counter

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model

TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="tpu:0")
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    path = resolve_model(given.model)
    print(f"{'rows':>4} {'steps':>5} {'tokens/s':>9} {'host us/token':>13}")
    for rows in given.rows:
        outputs = []
        for steps in given.steps:
            config = EngineConfig(
                backend=given.device, max_batch=rows, context=512, dtype=given.dtype,
                decode_steps=steps, sampling="sample",
            )  # fmt: skip
            with InferenceEngine(open_model(path), config=config) as engine:
                engine.core.scheduler.repeats.seconds = float("inf")
                rate, host, tokens = measured(engine, rows, given.runs)
            outputs.append(tokens)
            print(f"{rows:>4} {steps:>5} {rate:>9.1f} {1e6 * host:>13.1f}", flush=True)
        assert outputs.count(outputs[0]) == len(outputs), "the outputs differ"


def measured(engine, rows, runs):
    """Return the most tokens per second, host seconds per token, and the tokens."""
    waits = timed_waits(engine.runner)
    prompts = [[row + 1, 40, 5, 6, 7, 8, 9, 10] for row in range(rows)]
    options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 1}
    engine.generate(prompts, **options)  # compiles
    best, host, tokens = 0.0, 0.0, []
    for _ in range(runs):
        waits.clear()
        began = perf_counter()
        answers = engine.generate(prompts, **options)
        seconds = perf_counter() - began
        tokens = [answer.token_ids for answer in answers]
        count = sum(map(len, tokens))
        if count / seconds > best:
            best, host = count / seconds, (seconds - sum(waits)) / count
    return best, host, tokens


def timed_waits(runner):
    """Measure the seconds in which the runner waits for tokens; returns their list."""
    waits = []
    backend = runner.executor.backend
    numpy = backend.numpy

    def timed(x):
        began = perf_counter()
        result = numpy(x)
        waits.append(perf_counter() - began)
        return result

    object.__setattr__(backend, "numpy", timed)
    return waits


if __name__ == "__main__":
    main()
