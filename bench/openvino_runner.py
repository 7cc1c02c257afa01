"""Steps of the default model on OpenVINO's CPU device, beside inl-cpu.

Both runners get the same frames of real tokens: decoding rows behind 128 cached tokens,
and prompts. Prints the shortest times of interleaved rounds, and their ratio. Needs
``pip install 'inl-intel[openvino]'``.

    python bench/openvino_runner.py --rounds 5
    python bench/openvino_runner.py --threads 1 --cpu-time    # a busy machine
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

from inl import Device, EngineConfig
from inl.checkpoints.hub.resolve import default_model
from inl.executor.model_loader import open_model
from inl.plugin import make_backend
from inl.runners.local_runner import start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl_intel.openvino.backend import OpenVinoBackend

SIZES = ((1, 1), (8, 8), (32, 32), (32, 1), (512, 1))
"""Tokens and rows of the steps."""
CACHED, CONTEXT, DECODES = 128, 1024, 5


class Steps:
    """A runner whose rows 1, 2 ... are admitted before each step that is timed."""

    def __init__(self, runner, clock):
        self.runner, self._clock, self._count = runner, clock, 0
        limits = runner.limits
        self._sizes = {
            "groups": limits.groups,
            "max_blocks_per_seq": limits.max_blocks_per_seq,
        }
        self._ids = np.random.default_rng(0).integers(100, limits.vocab, 512).tolist()

    def best(self, tokens, rows):
        """Shortest seconds of decoding steps, or those of one prompt."""
        decoding = tokens == rows
        for slot in range(1, rows + 1):
            self._admit(slot, tokens // rows, CACHED if decoding else 0)
        if decoding:
            self._step(tokens, rows)
        return min(self._step(tokens, rows) for _ in range(DECODES if decoding else 1))

    def _admit(self, slot, tokens, cached):
        limits = self.runner.limits
        count = -(-(cached + tokens + DECODES + 1) // limits.block_size)
        first = 1 + (slot - 1) * count
        assert first + count <= min(limits.blocks), "the cache holds all rows"
        table = [list(range(first, first + count))] * limits.groups
        self.runner.submit(admit_frame(slot, table, length=cached, **self._sizes))

    def _step(self, tokens, rows):
        self._count += 1
        ids = self._ids[: tokens // rows]
        frame = step_frame(
            Bucket(tokens, rows), [Row(slot + 1, ids) for slot in range(rows)],
            step=self._count, groups=self.runner.limits.groups,
            block_size=self.runner.limits.block_size,
            decode_rows=rows if tokens == rows else 0,
        )  # fmt: skip
        began = self._clock()
        self.runner.submit(frame)
        self.runner.collect()
        return self._clock() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="default: INL's default model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="of the process")
    parser.add_argument("--dtype", default="auto", help="of both")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    os.environ["INL_THREADS"] = str(given.threads)
    language = open_model(given.model or default_model())
    config = EngineConfig(
        max_batch=32, context=CONTEXT, sampling="greedy", prefix_cache=False,
        dtype=given.dtype,
    )  # fmt: skip
    backends = (
        make_backend(Device("cpu:0")),
        OpenVinoBackend(Device("xpu:0"), name="CPU"),
    )
    both = [Steps(start_runner(language, each, config), clock) for each in backends]
    print("tokens  rows  inl-cpu ms  OpenVINO ms  inl-cpu ahead by")
    for tokens, rows in SIZES:
        times = [
            [each.best(tokens, rows) for each in both] for _ in range(given.rounds + 1)
        ]
        ours, theirs = 1e3 * np.array(times)[1:].min(0)
        print(
            f"{tokens:6} {rows:5} {ours:11.1f} {theirs:12.1f} {theirs / ours:17.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
