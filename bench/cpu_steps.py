"""Where a step's time goes on the CPU: each kind of instruction of the default model.

    python bench/cpu_steps.py [--prefill 512 2000] [--rows 1 8] [--contexts 128 8000]
                              [--verify 2 4 8 16] [--dtype bfloat16]
                              [--kv-dtype int8] [--cpu-time]

A step is recorded as the engine records it; then its instructions are run one at a
time, with the clock read in between, so the sum is a little more than a whole step,
which is timed too. The tokens are random, and a decoding row's cache holds zeros.
``--verify`` takes steps that verify drafts of one row, of so many tokens each.
``--cpu-time`` counts processor time of all threads, for a machine that others share.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import Counter

import numpy as np

from inl import Device, EngineConfig
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.runners.local_runner import start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl_cpu.abi import MatrixStruct
from inl_cpu.encoding import Instruction
from inl_cpu.instructions import Linear


class Steps:
    """A runner, and the message of one step at a time."""

    def __init__(self, language, given, rows, context, width=1):
        tokens = -(-(context + 1) // 64) * 64
        config = EngineConfig(
            backend="cpu", dtype=given.dtype, max_batch=rows, context=tokens,
            sampling="greedy", token_budget=max([512, *given.prefill]),
            kv_dtype=given.kv_dtype, max_drafts=width - 1 or None,
            speculation="ngram" if width > 1 else None,
        )  # fmt: skip
        self.backend = make_backend(Device("cpu"))
        self.runner = start_runner(language, self.backend, config)
        # Pages that nobody wrote are one of zeros, which the first cache would hold.
        for cache in self.runner.executor.state.caches:
            cache.k.fill(0)
            cache.v.fill(0)
        self.rows, self.width = rows, width

    def admit(self, length):
        """Rows whose caches hold ``length`` tokens, each in blocks of its own."""
        limits = self.runner.limits
        for row in range(self.rows):
            first = 1 + row * limits.max_blocks_per_seq
            table = [
                list(range(first, first + limits.max_blocks_per_seq))
            ] * limits.groups
            frame = admit_frame(
                1 + row, table, groups=limits.groups,
                max_blocks_per_seq=limits.max_blocks_per_seq,
                length=length, last=17,
            )  # fmt: skip
            self.runner.submit(frame)
        # The instructions are run without the runner, which would apply them.
        self.runner._apply_admissions()

    def run(self, tokens):
        """One step with ``tokens`` of each row."""
        limits = self.runner.limits
        bucket = Bucket(self.rows * len(tokens), self.rows, tokens_per_row=self.width)
        rows = [Row(1 + row, tokens) for row in range(self.rows)]
        message = step_frame(
            bucket, rows, step=0, groups=limits.groups, block_size=limits.block_size,
            decode_rows=self.rows if len(tokens) in (1, self.width) else 0,
        )  # fmt: skip
        self.runner.submit(message)
        return self.runner.collect()

    def recording(self):
        """What the last step was recorded as."""
        return next(reversed(self.backend.programs.values()))


def kind_of(item):
    """Name of an instruction; products by their shape."""
    if not isinstance(item, Instruction):
        return "python"
    if not isinstance(item, Linear):
        return item.spec().name
    matrix = MatrixStruct.from_address(item.matrix.address)
    rows, columns = matrix.rows, matrix.columns
    return f"linear {rows} x {columns}"


def profile(steps, prepare, tokens, clock, rounds):
    """Seconds of a whole step, and of each kind of instruction in it."""
    prepare()
    steps.run(tokens)
    items = steps.recording().steps
    machine = steps.backend.emitter.machine
    packed = [
        ctypes.create_string_buffer(item.encoded())
        if isinstance(item, Instruction)
        else None
        for item in items
    ]
    whole, parts = [], []
    for _ in range(rounds):
        prepare()
        began = clock()
        steps.run(tokens)
        whole.append(clock() - began)
        prepare()
        spent = Counter()
        for item, place in zip(items, packed, strict=True):
            began = clock()
            if place is None:
                item.run()
            else:
                machine.run(ctypes.addressof(place), 1)
            spent[kind_of(item)] += clock() - began
        parts.append(spent)
    kinds = {kind: statistics.median(p[kind] for p in parts) for kind in parts[0]}
    return statistics.median(whole), kinds, len(items)


def show(title, tokens, whole, kinds, count):
    print(
        f"{title}: {1e3 * whole:.2f} ms, {tokens / whole:,.0f} tokens/s, "
        f"{count} instructions"
    )
    total = sum(kinds.values())
    for kind, spent in sorted(kinds.items(), key=lambda pair: -pair[1]):
        if spent > total / 500:
            print(f"    {kind:<24}{1e3 * spent:9.3f} ms {spent / total:6.1%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--verify", type=int, nargs="*", default=[])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 2000, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    language = open_model(resolve_model(given.model))
    rng = np.random.default_rng(0)
    found = {}

    def measure(title, steps, length, tokens):
        measured = profile(
            steps, lambda: steps.admit(length), tokens, clock, given.rounds
        )
        found[title] = {"seconds": measured[0], **measured[1]}
        if not given.json:
            show(title, steps.rows * len(tokens), *measured)
        steps.runner.close()

    for count in given.prefill:
        steps = Steps(language, given, 1, count)
        tokens = rng.integers(0, 1000, count).tolist()
        measure(f"prefill of {count}", steps, 0, tokens)
    for context in given.contexts:
        for rows in given.rows:
            steps = Steps(language, given, rows, context)
            measure(f"decoding, {rows} rows of {context}", steps, context, [-1])
        for width in given.verify:
            steps = Steps(language, given, 1, context + width, width)
            tokens = rng.integers(0, 1000, width).tolist()
            measure(f"verifying {width} after {context}", steps, context, tokens)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
