"""Caches in other dtypes than that of the model, and the Pallas kernel that writes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inl import EngineConfig
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.ops.attention import random_step
from inl.runners.local_runner import start_runner
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl_jax.pages import Pages, read_kv
from inl_jax.pages import write_kv as scatter
from inl_jax.pallas import write_kv
from tpu_simulator import races, simulated

HEADS, PAGE, DIM = 3, 32, 64
ROWS = {"cached": [3, 40, 0, 70], "counts": [1, 1, 20, 33]}
LONG = {"cached": [63, 40, 5], "counts": [1, 3, 275]}


def random_pages(rng, blocks, dtype):
    cells = rng.standard_normal((blocks, HEADS, PAGE, 2 * DIM))
    if dtype != "int8":
        return Pages(jnp.asarray(cells, dtype))
    scales = rng.standard_normal((blocks, HEADS, 128))
    return Pages(jnp.asarray(20 * cells, dtype), jnp.asarray(scales, "float32"))


def check(run, rows, dtype):
    """Write the tokens of a step; every other cell keeps its bits."""
    rng = np.random.default_rng(3)
    step, blocks = random_step(rng, **rows, block_size=PAGE, pad_rows=1, pad_tokens=9)
    writes = step.writes[0]
    sizes = 2.0 ** rng.integers(-4, 4, (2, len(writes), HEADS, 1))
    new = rng.standard_normal((2, len(writes), HEADS, DIM)) * sizes
    k, v = jnp.asarray(new, "bfloat16")
    pages = random_pages(rng, blocks, dtype)
    after = run(k, v, pages, jnp.asarray(writes))
    ids = jnp.arange(blocks)[None]
    used = writes[writes >= PAGE]
    others = np.setdiff1d(np.arange(PAGE, blocks * PAGE), used)
    exact = jnp.asarray([k, v]).astype(jnp.float32)
    for written, before, given in zip(
        read_kv(after, ids), read_kv(pages, ids), exact, strict=True
    ):
        cells = np.asarray(written[0], np.float64).swapaxes(0, 1)
        kept = np.asarray(before[0], np.float64).swapaxes(0, 1)
        wanted = np.asarray(given, np.float64)[writes >= PAGE]
        step_size = np.abs(wanted).max(-1, keepdims=True) / 127
        most = 0.5001 * step_size if dtype == "int8" else 0
        assert (np.abs(cells[used] - wanted) <= most).all()
        assert np.array_equal(cells[others], kept[others])


@pytest.mark.parametrize("rows", [ROWS, LONG], ids=["rows", "long"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_scatter_writes_each_cell(dtype, rows):
    check(scatter, rows, dtype)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        ("int8", ROWS),
        pytest.param("bfloat16", LONG, marks=pytest.mark.full),
        pytest.param("float32", ROWS, marks=pytest.mark.full),
    ],
)
def test_the_pallas_kernel_writes_each_cell(dtype, rows):
    def run(*args):
        return write_kv.write_kv(*args, interpret=simulated())

    check(run, rows, dtype)
    assert not races()


def test_a_misplaced_run_is_found(monkeypatch):
    right = write_kv.runs_of

    def wrong(*args):
        runs, count = right(*args)
        return runs._replace(stop=runs.start + 1), count

    monkeypatch.setattr(write_kv, "runs_of", wrong)
    with pytest.raises(AssertionError):
        test_the_pallas_kernel_writes_each_cell("int8", ROWS)


def test_a_step_of_padding_writes_block_0_only():
    pages = random_pages(np.random.default_rng(0), 4, "int8")
    k = jnp.ones((5, HEADS, DIM))
    after = write_kv.write_kv(
        k, k, pages, jnp.zeros(5, jnp.int32), interpret=simulated()
    )
    for new, old in zip(after, pages, strict=True):
        assert np.array_equal(new[1:], old[1:])


def logits(backend, kv_dtype):
    """Logits of the last of 90 tokens, computed in two steps."""
    config, tensors = tiny_llama(
        np.random.default_rng(5), hidden=64, heads=2, kv_heads=1, head_dim=64
    )
    files = MemoryCheckpoint(config, tensors)
    language = LanguageModel(MODEL, MODEL.config(config), files)
    runner = start_runner(
        language,
        backend,
        EngineConfig(dtype="float32", kv_dtype=kv_dtype, context=96, max_batch=2),
    )
    limits = runner.limits
    blocks = limits.max_blocks_per_seq
    table = [list(range(1, 1 + blocks))]
    runner.submit(admit_frame(1, table, groups=1, max_blocks_per_seq=blocks))
    ids = np.random.default_rng(7).integers(0, 40, 90).tolist()
    for number, part in enumerate((ids[:80], ids[80:])):
        frame = step_frame(
            Bucket(192, 2), [Row(1, part)], step=number, decode_rows=0, groups=1,
            block_size=limits.block_size,
        )  # fmt: skip
        found = runner.logits(frame).data[0]
    return found


def test_quantized_caches_change_logits_slightly(tpu_backend):
    exact = logits(tpu_backend, "auto")
    spread = np.ptp(exact)
    for kv_dtype, most in (("bfloat16", 0.02), ("int8", 0.03)):
        off = np.abs(logits(tpu_backend, kv_dtype) - exact).max()
        assert 0 < off < most * spread, (kv_dtype, off, spread)
