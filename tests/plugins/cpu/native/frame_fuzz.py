"""Mutated frames through a runner on a native library: ``frame_fuzz.py LIBRARY COUNT``.

Prints how many frames were accepted and refused. A frame is refused with
``ProtocolError`` before it reaches the library, or its indices are in range.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from inl.device import Device
from inl.errors import ProtocolError
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.spec.message import (
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.step import SAMPLERS, Bucket
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl_cpu import library
from inl_cpu.native_backend import NativeBackend

LIMITS = Limits(
    slots=4, blocks=(9,), block_size=16, max_blocks_per_seq=3, vocab=64, depth=1
)
EXTREMES = np.array([-(2**31), -2, -1, 0, 1, 2, 15, 16, 63, 64, 2**31 - 1], np.int32)


def open_runner(path, dtype):
    loaded = ctypes.CDLL(str(path))
    library.declare_signatures(loaded)
    library.open_library = lambda: library.LoadedLibrary(loaded)
    config, tensors = tiny_llama(np.random.default_rng(3), vocab=LIMITS.vocab)
    backend = NativeBackend(Device("cpu"))
    checkpoint = MemoryCheckpoint(config, tensors)
    return local_runner(backend, MODEL, checkpoint, LIMITS, dtype=dtype)


def random_frame(rng, step):
    """A valid frame: a step, an admission, or token biases."""
    kind = rng.integers(6)
    slot = int(rng.integers(1, LIMITS.slots))
    if kind == 0:
        blocks = [rng.integers(0, LIMITS.blocks[0], 3).tolist()]
        return admit_frame(
            slot, blocks, groups=1, max_blocks_per_seq=3, length=int(rng.integers(9))
        )
    if kind == 1:
        return token_bias_frame(slot, [TokenBias(int(rng.integers(64)), 1, 0.5)])
    counts = [1] if rng.integers(2) else rng.integers(1, 6, 2).tolist()
    rows = [
        Row(1 + at, rng.integers(0, 64, count).tolist(), (float(rng.uniform()),))
        for at, count in enumerate(counts)
    ]
    update = BlockTableUpdate(0, slot, int(rng.integers(3)), int(rng.integers(9)))
    sampler = str(rng.choice(SAMPLERS))
    bucket = Bucket(sum(counts), len(counts), sampler=sampler)
    return step_frame(
        bucket, rows, [update], step=step, groups=1, block_size=LIMITS.block_size,
        decode_rows=int(len(counts) == 1),
    )  # fmt: skip


def mutate(rng, frame):
    """Change up to two words, mostly to extreme values, or the length."""
    frame = frame.copy()
    for _ in range(rng.integers(3)):
        extreme = rng.choice(EXTREMES)
        value = extreme if rng.integers(4) else rng.integers(-(2**31), 2**31)
        frame[rng.integers(len(frame))] = value
    return frame[: rng.integers(len(frame))] if rng.integers(20) == 0 else frame


def main(path, count):
    rng = np.random.default_rng(17)
    runners = [open_runner(path, dtype) for dtype in ("bfloat16", "float32")]
    outcomes = {"accepted": 0, "refused": 0}
    for number in range(count):
        runner = runners[number % 2]
        frame = mutate(rng, random_frame(rng, number))
        try:
            runner.submit(frame)
            outcomes["accepted"] += 1
        except ProtocolError:
            outcomes["refused"] += 1
            continue
        with suppress(ProtocolError):  # it was no step
            runner.collect()
    print(outcomes["accepted"], outcomes["refused"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
