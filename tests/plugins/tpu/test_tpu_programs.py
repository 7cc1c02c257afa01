"""The compiled programs of a tiny Llama: what XLA is given, and what it makes of it."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inl.backend.base import Precompiler
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play
from inl_jax import xla
from inl_jax.programs import Compiler, jitted

LAYERS, BLOCK = 2, 4
# With a prime number of blocks, no other array has the shape of a cache.
LIMITS = Limits(
    slots=8,
    blocks=(83,),
    block_size=BLOCK,
    max_blocks_per_seq=12,
    vocab=96,
    sampler="greedy",
)
ADMISSIONS = 2
"""Programs that write and clear slots."""

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def files():
    sizes = {"layers": LAYERS, "kv_heads": 4}
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(11), **sizes))


@pytest.fixture(scope="module")
def runner(tpu_backend, files):
    return local_runner(tpu_backend, MODEL, files, LIMITS)


def arguments(runner, bucket):
    executor = runner.executor
    return executor.loaded.weights, executor.dummy_message(bucket), executor.state


def lowered(runner, bucket, body=None):
    """The program of a bucket as XLA is given it."""
    name = "repeat" if bucket.repeat > 1 else "advance"
    body = body or runner.executor._body(name, bucket, None)
    return jitted(body, (2,)).lower(*arguments(runner, bucket))


@contextmanager
def compilations():
    """A list that gains an entry whenever XLA compiles anything."""
    seen = []

    def listen(event, _seconds, **_):
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def calls_to_the_host(program):
    """Every custom call of a program, before and after XLA's passes."""
    before = re.findall(r"custom_call @(\w+)", program.as_text())
    after = re.findall(r'custom_call_target="([^"]+)"', program.compile().as_text())
    return [name for name in before + after if "callback" in name]


def copies_of_a_cache(text):
    """Instructions that copy or transpose as many elements as a cache has."""
    size = LIMITS.blocks[0] * BLOCK * 4 * 16
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    return [dims for dims in moved if np.prod([*map(int, dims.split(","))]) == size]


def aliased(text):
    """Outputs that live in an argument's buffer."""
    return len(re.findall(r"\{\d+\}: \(\d+, \{\}, (?:may|must)-alias\)", text))


REPEATED = tuple(Bucket(rows, rows, repeat=5) for rows in (1, 7))
BUCKETS = (Bucket(1, 1), Bucket(7, 7), Bucket(64, 7), *REPEATED)


def test_the_buckets_are_compiled_sizes(runner):
    sizes = [(bucket.tokens, bucket.rows) for bucket in runner.limits.buckets]
    assert sizes == [(1, 1), (7, 7), (64, 7), (336, 7)]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_state_is_donated_and_no_program_copies_a_cache_or_calls_the_host(
    runner, bucket
):
    program = lowered(runner, bucket)
    text = program.compile().as_text()
    state = jax.tree.leaves(runner.executor.state)
    assert aliased(text) == len(state) == LAYERS + 7
    assert copies_of_a_cache(text) == []
    assert calls_to_the_host(program) == []


def test_a_host_callback_and_a_copied_cache_are_found(runner):
    own = runner.executor._body("advance", BUCKETS[0], None)

    def wrong(weights, message, state):
        tokens, state = own(weights, message, state)
        tokens = jax.pure_callback(lambda x: x, tokens, tokens)
        flipped = jnp.flip(state.caches[0].kv.swapaxes(1, 2), 2).swapaxes(1, 2)
        caches = (state.caches[0]._replace(kv=flipped), *state.caches[1:])
        return tokens, state._replace(caches=caches)

    program = lowered(runner, BUCKETS[0], wrong)
    assert calls_to_the_host(program)
    assert copies_of_a_cache(program.compile().as_text())


@pytest.mark.parametrize("bucket", BUCKETS[:2])
def test_no_program_converts_a_cache_of_bfloat16(tpu_backend, files, bucket):
    """As XLA for CPUs would, to write to it."""
    runner = local_runner(tpu_backend, MODEL, files, LIMITS, dtype="bfloat16")
    text = lowered(runner, bucket).compile().as_text()
    shape = ",".join(map(str, runner.executor.state.caches[0].kv.shape))
    assert f"u16[{shape}]" in text
    assert not re.findall(rf"= (?:f32|bf16)\[{shape}\]", text)


def products(runner, bucket, platform="cpu"):
    """Products of a program as XLA is given it, and those of float32 precision."""
    body = runner.executor._body(
        "repeat" if bucket.repeat > 1 else "advance", bucket, None
    )
    traced = jitted(body, (2,)).trace(*arguments(runner, bucket))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"stablehlo\.dot_general.*", text)
    return found, [line for line in found if "precision = [HIGHEST, HIGHEST]" in line]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_product_has_float32_precision(runner, bucket, platform):
    found, precise = products(runner, bucket, platform)
    assert len(found) == LAYERS * 9 + 1
    assert precise == found


def test_a_product_of_default_precision_is_found(tpu_backend, files, monkeypatch):
    def wrong(x, w):
        return jnp.einsum("tk,nk->tn", x, w.weight)

    kernels = (
        replace(each, run=wrong) if each.op == "linear" else each
        for each in xla.KERNELS
    )
    monkeypatch.setattr(xla, "KERNELS", tuple(kernels))
    runner = local_runner(tpu_backend, MODEL, files, LIMITS)
    found, precise = products(runner, BUCKETS[0], "tpu")
    assert len(found) == LAYERS * 9 + 1
    assert len(precise) == LAYERS * 2, "those of attention"


def test_the_state_stays_in_place(runner):
    executor = runner.executor
    before = [x for x in jax.tree.leaves(executor.state) if x.size]
    addresses = [array.unsafe_buffer_pointer() for array in before]
    executor.advance(Bucket(1, 1), executor.dummy_message(Bucket(1, 1)))
    after = [x for x in jax.tree.leaves(executor.state) if x.size]
    assert all(array.is_deleted() for array in before)
    assert [array.unsafe_buffer_pointer() for array in after] == addresses


def test_tokens_equal_the_float64_reference_and_each_bucket_is_compiled_once(
    tpu_backend, files
):
    def traffic(limits):
        return Traffic(np.random.default_rng(4), limits, sampler="greedy").frames(60)

    runner = local_runner(tpu_backend, MODEL, files, LIMITS)
    warm, buckets = [], runner.limits.buckets
    with compilations() as seen:
        runner.executor.warm_up(lambda done, total: warm.append((done, total)))
    assert warm == [(count, 4) for count in (1, 2, 3, 4)]
    assert len(seen) <= len(buckets) + ADMISSIONS
    with compilations() as seen:
        texts = play(runner, traffic(runner.limits))
    assert seen == []
    reference = ReferenceBackend(Device("reference:0"), dtype="float64")
    exact = local_runner(reference, MODEL, files, LIMITS, dtype="float64")
    # The frames are those of the compiled sizes.
    assert sum(map(len, texts.values())) > 100
    assert texts == play(exact, traffic(runner.limits))


def test_programs_without_a_warm_up_are_compiled_once(tpu_backend, files):
    """No more than the buckets of the steps, and admissions."""
    runner = local_runner(tpu_backend, MODEL, files, LIMITS)
    frames = Traffic(np.random.default_rng(4), runner.limits, sampler="greedy")
    with compilations() as seen:
        play(runner, frames.frames(60))
    assert 1 < len(seen) <= len(runner.limits.buckets) + ADMISSIONS


def test_programs_that_are_compiled_again_are_found(tpu_backend, files, monkeypatch):
    def step(self, function, bucket, consumes):
        return lambda *args: self._compiled(function, consumes, args)(*args)

    monkeypatch.setattr(Compiler, "step", step)
    runner = local_runner(tpu_backend, MODEL, files, LIMITS)
    frames = Traffic(np.random.default_rng(4), runner.limits, sampler="greedy")
    with compilations() as seen:
        play(runner, frames.frames(12))
    assert len(seen) > len(runner.limits.buckets) + ADMISSIONS


def test_programs_are_compiled_before_their_first_call(tpu_backend, files):
    """Threads compile; the first call finds a finished program."""
    runner = local_runner(tpu_backend, MODEL, files, LIMITS)
    executor, bucket = runner.executor, Bucket(7, 7)
    # The backend is shared: other tests may have left some.
    before = set(tpu_backend.compiler._started)
    executor.precompile([bucket])
    (key,) = set(tpu_backend.compiler._started) - before
    task = tpu_backend.compiler._started[key]
    task._done.put(task.result())  # compiled; keep it for the call below
    message = executor.dummy_message(bucket)
    with compilations() as seen:
        executor.advance(bucket, message)
    assert seen == []
    assert all(bucket not in key for key in tpu_backend.compiler._started)
    assert isinstance(tpu_backend.offers(Precompiler), Precompiler)
