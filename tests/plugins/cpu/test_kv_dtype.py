"""KV caches in other dtypes than that of the model."""

from __future__ import annotations

import numpy as np
import pytest

from inl import EngineConfig
from inl.errors import RequestError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.plugin import make_backend
from inl.runners.local_runner import start_runner
from inl.spec.cache import Paged
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

IDS = np.random.default_rng(7).integers(0, 40, 90).tolist()


def language():
    config, tensors = tiny_llama(
        np.random.default_rng(5), hidden=64, heads=2, kv_heads=1, head_dim=64
    )
    files = MemoryCheckpoint(config, tensors)
    return LanguageModel(MODEL, MODEL.config(config), files)


def runner_of(backend, kv_dtype, dtype="float32", **options):
    config = EngineConfig(
        dtype=dtype, kv_dtype=kv_dtype, context=96, **{"max_batch": 2} | options
    )
    return start_runner(language(), backend, config)


def logits(runner, parts):
    """Logits of the last token of IDS, fed in parts."""
    limits = runner.limits
    table = [list(range(1, 1 + limits.max_blocks_per_seq))]
    runner.submit(
        admit_frame(1, table, groups=1, max_blocks_per_seq=limits.max_blocks_per_seq)
    )
    start = 0
    for number, part in enumerate(parts):
        rows = [Row(1, IDS[start : start + part])]
        message = step_frame(
            Bucket(part, 1), rows, step=number, decode_rows=0, groups=1,
            block_size=limits.block_size,
        )  # fmt: skip
        found = runner.logits(message).data[0]
        start += part
    return found


def test_quantized_caches_change_logits_slightly(backend):
    exact = logits(runner_of(backend, "auto"), [80, 10])
    assert np.array_equal(logits(runner_of(backend, "float32"), [80, 10]), exact)
    spread = np.ptp(exact)
    for kv_dtype, most in (("bfloat16", 0.02), ("int8", 0.03), ("fp8", 0.1)):
        off = np.abs(logits(runner_of(backend, kv_dtype), [80, 10]) - exact).max()
        assert 0 < off < most * spread, (kv_dtype, off, spread)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_chunking_changes_no_bit(backend, kv_dtype, dtype):
    runner = runner_of(backend, kv_dtype, dtype, invariant=True)
    want = logits(runner, [90])
    for parts in ([89, 1], [40, 50], [1] * 90):
        assert np.array_equal(logits(runner, parts), want), parts


def test_bytes_per_token():
    sizes = {
        dtype: Paged((0, 1), 3, 64, dtype).token_bytes
        for dtype in ("float32", "bfloat16", "int8", "float8_e4m3")
    }
    assert sizes == {
        "float32": 1536, "bfloat16": 768, "int8": 408, "float8_e4m3": 384,
    }  # fmt: skip


def test_one_byte_nearly_doubles_the_blocks(backend):
    blocks = {
        kv_dtype: runner_of(
            backend, kv_dtype, cache_bytes=800_000, max_batch=64
        ).limits.blocks[0]
        for kv_dtype in ("bfloat16", "int8", "fp8")
    }
    assert 1.8 < blocks["int8"] / blocks["bfloat16"] < 2
    assert blocks["fp8"] // blocks["bfloat16"] == 2


def test_unsupported_dtypes_are_refused(backend):
    with pytest.raises(RequestError, match=r"kv_dtype: found 'int4', cpu:0 accepts"):
        runner_of(backend, "int4")
    accepted = r"found 'int8', reference:0 accepts auto, fp8;"
    with pytest.raises(RequestError, match=accepted):
        runner_of(make_backend("reference"), "int8")
