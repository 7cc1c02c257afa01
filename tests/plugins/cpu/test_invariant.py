"""In invariant mode logits are bitwise independent of the batch."""

from __future__ import annotations

import numpy as np
import pytest

from inl import EngineConfig
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.invariant_checks import missing_kernels, same_bits
from inl.testing.oracle import Tiny
from inl.testing.target import Target
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6] * 3


@pytest.fixture(params=["float32", "bfloat16"])
def runner(backend, request):
    config, tensors = tiny_llama(
        np.random.default_rng(5), hidden=64, heads=2, kv_heads=1, head_dim=64
    )
    files = MemoryCheckpoint(config, tensors)
    language = LanguageModel(MODEL, MODEL.config(config), files)
    options = EngineConfig(dtype=request.param, invariant=True, max_batch=3, context=96)
    return start_runner(language, backend, options)


def logits(runner, parts, *, other=()):
    """Logits of the last token of IDS, fed in parts; ``other`` shares the last step."""
    limits = runner.limits
    common = {"groups": 1, "block_size": limits.block_size}
    for slot in (1, 2):
        first = 1 + (slot - 1) * limits.max_blocks_per_seq
        table = [list(range(first, first + limits.max_blocks_per_seq))]
        runner.submit(
            admit_frame(
                slot, table, groups=1, max_blocks_per_seq=limits.max_blocks_per_seq
            )
        )
    start, found = 0, None
    for number, part in enumerate(parts):
        rows = [Row(1, IDS[start : start + part])]
        if other and number == len(parts) - 1:
            rows.append(Row(2, list(other)))
        bucket = Bucket(sum(len(row.tokens) for row in rows), len(rows))
        message = step_frame(bucket, rows, step=number, decode_rows=0, **common)
        found = runner.logits(message).data[0]
        start += part
    assert start == len(IDS)
    return found


def test_chunking_and_batching_change_no_bit(runner):
    want = logits(runner, [len(IDS)])
    for parts in ([62, 1], [40, 23], [1] * len(IDS)):
        np.testing.assert_array_equal(logits(runner, parts), want, err_msg=str(parts))
    shared = logits(runner, [62, 1], other=[7] * 40)
    np.testing.assert_array_equal(shared, want)


def test_the_check_detects_a_changed_token(runner):
    want = logits(runner, [len(IDS)])
    IDS[0] ^= 1
    try:
        assert (logits(runner, [len(IDS)]) != want).any()
    finally:
        IDS[0] ^= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_serve_a_request_gives_the_same_bits(dtype):
    target = Target(Device("cpu"), seed=2)
    assert not {"expand_rows", "verify", "lora"} & set(missing_kernels(target))
    same_bits(Tiny(target, dtype))
