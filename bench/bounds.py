"""Durations of host work against upper bounds; needs a quiet machine.

    python bench/bounds.py [NAME ...]

Prints a line for each measurement. The exit code is 1 if one is above its bound.
Tests do not measure time: they would fail on a busy machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from inl.protocol.runner import Limits, Reply
from inl.recording.recorder import Recorder
from inl.recording.trace_file import RunHeader
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import release_frame

LIMITS = Limits(5, (9,), 4, 8, 100)
ROWS = 512


class Bound(NamedTuple):
    """A measurement: milliseconds of one call."""

    name: str
    most_ms: float
    measure: Callable[[], float]


def milliseconds(work: Callable[[], object], *, rounds: int, calls: int = 1) -> float:
    """Median duration of a call, over rounds of ``calls`` calls."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        times.append(1e3 * (time.perf_counter() - began) / calls)
    return statistics.median(times)


def process(*arguments: str) -> Callable[[], float]:
    """Measure a fresh interpreter."""

    def run() -> None:
        command = [sys.executable, *arguments]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    return lambda: milliseconds(run, rounds=10)


def scheduler_step(waiting: int) -> Callable[[], float]:
    """Measure a step of 512 decoding rows while ``waiting`` requests are queued."""

    def measure() -> float:
        limits = Limits(ROWS + 1, (40_000,), 16, 512, 1_000)
        scheduler = Scheduler(limits, SchedulerConfig(token_budget=8_192))
        for number in range(ROWS + waiting):
            scheduler.add(Request([number % 1_000] * 16, max_tokens=1_000))
        scheduler.plan()

        def step() -> None:
            scheduler.plan()
            scheduler.process_outputs([7] * ROWS)

        return milliseconds(step, rounds=64)

    return measure


def recording() -> float:
    """Measure what the recorder adds to a step."""
    recorder = Recorder(lambda: RunHeader(LIMITS))
    frame = release_frame(1, groups=1, max_blocks_per_seq=8)
    reply = Reply(1, np.zeros((1, 1), np.int32))

    def step() -> None:
        recorder.add(frame)
        recorder.add(reply)

    return milliseconds(step, rounds=20, calls=1_000)


def template() -> float:
    """Measure one rendering in the process of a chat template."""
    from inl.text.template import ChatTemplate

    made = ChatTemplate("{{ messages[0].content }}")
    messages = [{"role": "user", "content": "hello"}]
    made.apply(messages)
    spent = milliseconds(lambda: made.apply(messages), rounds=100)
    made.close()
    return spent


def open_gguf() -> float:
    """Measure parsing the default model's file, vocabulary included."""
    from inl.checkpoints.gguf.file import GgufFile
    from inl.checkpoints.hub.resolve import default_model

    path = default_model()
    return milliseconds(lambda: GgufFile(path).file.close(), rounds=5)


def dequantizing() -> float:
    """Measure dequantizing every tensor of the default model on the host."""
    from inl.checkpoints.blocks.dtypes import dequantize
    from inl.checkpoints.checkpoint import open_checkpoint
    from inl.checkpoints.hub.resolve import default_model

    checkpoint = open_checkpoint(default_model())

    def decode() -> None:
        for name in checkpoint.names():
            dequantize(checkpoint.tensor(name), name)

    return milliseconds(decode, rounds=1)


def long_word() -> float:
    """Measure tokenizing a word of 50,000 letters without ``tokenizers``."""
    from inl.checkpoints.gguf.file import GgufFile
    from inl.checkpoints.hub.resolve import default_model
    from inl.text.gguf_vocabulary import open_tokenizer

    hidden = sys.modules.pop("tokenizers", None)
    sys.modules["tokenizers"] = None  # type: ignore[assignment]
    try:
        path = default_model()
        tokenizer = open_tokenizer(GgufFile(path).metadata, str(path))
    finally:
        del sys.modules["tokenizers"]
        if hidden is not None:
            sys.modules["tokenizers"] = hidden
    return milliseconds(lambda: tokenizer.encode("abcdefghij" * 5_000), rounds=3)


BOUNDS = (
    Bound("import", 100, process("-c", "import inl")),
    Bound("devices", 300, process("-m", "inl", "devices")),
    Bound("scheduler", 4, scheduler_step(10)),
    Bound("scheduler-queue", 4, scheduler_step(100_000)),
    Bound("recorder", 0.02, recording),
    Bound("template", 20, template),
    Bound("gguf", 300, open_gguf),
    Bound("dequantize", 10_000, dequantizing),
    Bound("long-word", 5_000, long_word),
)


def failures(names: list[str]) -> Iterator[str]:
    """Measure, print, and yield the names above their bound."""
    for bound in BOUNDS:
        if names and bound.name not in names:
            continue
        spent = bound.measure()
        verdict = "ok" if spent < bound.most_ms else "ABOVE"
        print(
            f"{bound.name:16} {spent:10.3f} ms, bound {bound.most_ms:g} ms  {verdict}"
        )
        if verdict != "ok":
            yield bound.name


def main() -> None:
    names = sys.argv[1:]
    unknown = {*names} - {bound.name for bound in BOUNDS}
    if unknown:
        sys.exit(f"found {sorted(unknown)}; accepted: {[b.name for b in BOUNDS]}")
    sys.exit(len(list(failures(names))) > 0)


if __name__ == "__main__":
    main()
