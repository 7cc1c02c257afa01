"""Random damage: whatever the bytes, an error of ours or a result, fast and small."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import pytest
from safetensors.numpy import save

from inl.errors import InlError
from inl.weights.checkpoint import open_checkpoint
from inl.weights.quant import dequantize

ROUNDS = 400
NUMBERS = [
    0,
    1,
    2,
    31,
    33,
    255,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 60,
    (1 << 64) - 1,
]


def damaged(raw, rng, head):
    """One to four flips, cuts, splices or false lengths, mostly in the header."""
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        reach = min(len(raw), head) if rng.random() < 0.9 else len(raw)
        at = rng.randrange(max(reach, 1))
        kind = rng.randrange(5)
        if kind == 0 and raw:
            raw[min(at, len(raw) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[at:]
        elif kind == 2:
            del raw[at : at + rng.randint(1, 16)]
        elif kind == 3:
            start = rng.randrange(max(reach, 1))
            raw[at:at] = raw[start : start + rng.randint(1, 64)]
        else:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
    return bytes(raw)


def use(path):
    """All that a loader would ask for."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        dequantize(checkpoint.tensor(name), name)
    checkpoint.tokenizer().encode("abc")
    _ = checkpoint.chat_template
    checkpoint.close()


@pytest.fixture(params=["gguf", "safetensors"])
def target(request, tiny_gguf, tensors, tmp_path):
    """A valid file, what to open, and the size of its header."""
    if request.param == "gguf":
        return tiny_gguf, tiny_gguf, 6000
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tiny_gguf.unlink()
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(tensors))
    return path, tmp_path, 3000


def test_damage_gives_an_error_of_ours_or_none(target):
    path, opened, head = target
    rng = random.Random(5)
    whole = path.read_bytes()
    refused: list[int] = []
    tracemalloc.start()
    try:
        for turn in range(ROUNDS):
            path.write_bytes(damaged(whole, rng, head))
            began = time.perf_counter()
            try:
                use(opened)
            except InlError as error:
                refused.append(len(str(error)))
            assert time.perf_counter() - began < 1, turn
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(refused) > ROUNDS // 2
    assert max(refused) < 4000
    assert peak < 32_000_000
