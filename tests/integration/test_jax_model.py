"""A tiny Llama through the seam on ``jax.jit``: its answers and its programs."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.dtypes import wrap
from inl.models.llama import MODEL
from inl.spec.cache import Cache
from inl.spec.limits import Limits
from inl.spec.message import header, release_frame, step_frame, token_bias_frame
from inl.spec.step import SAMPLERS, Bucket
from inl.testing.tiny import MemoryCheckpoint, local_runner, plain_logits, tiny_llama
from inl.testing.traffic import Traffic, play

LAYERS, BLOCK, STEPS = 2, 4, 60
# With a prime number of blocks, no other array has the shape of a cache.
LIMITS = Limits(
    slots=8, blocks=(83,), block_size=BLOCK, max_blocks_per_seq=12, vocab=96
)
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def files():
    sizes = {"layers": LAYERS, "kv_heads": 4}
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(11), **sizes))


class Made:
    """A runner on JAX, and the programs that its backend compiled."""

    def __init__(self, jax_module, files, replaced=None, donate=True):
        self.programs, self.calls = {}, []
        small = iter(("admit", "set_token_bias"))

        def keep(function, bucket, consumes):
            program = jax_module.jit(function, bucket, consumes if donate else ())
            self.programs[bucket or next(small)] = program

            def run(*arguments):
                self.calls.append(bucket)
                return program(*arguments)

            return run

        backend = jax_module.jax_backend(replaced=replaced, compile=keep)
        self.backend = backend(Device("jax:0"))
        self.runner = local_runner(self.backend, MODEL, files, LIMITS)

    def arguments(self, bucket):
        """Weights, an empty step, and the state."""
        frame = step_frame(
            bucket, (), step=0, groups=1, block_size=BLOCK, decode_rows=0
        )
        runner = self.runner
        message = self.backend.tensor(wrap(frame))
        return runner.loaded.weights, message, runner.executor.state

    def lowered(self, bucket):
        """The program of a bucket as XLA is given it."""
        if bucket not in self.programs:
            self.runner.executor.program("advance", bucket)
        return self.programs[bucket].lower(*self.arguments(bucket))


@pytest.fixture(scope="module")
def made(jax_module, files):
    return Made(jax_module, files)


@contextmanager
def counted_compilations():
    """A list that gains an entry whenever XLA compiles anything."""
    from jax import monitoring

    seen = []

    def listen(event, _seconds, **_):
        if event == COMPILED:
            seen.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        monitoring.unregister_event_duration_listener(listen)


def traffic(limits, seed, sampler, **more):
    return Traffic(np.random.default_rng(seed), limits, sampler=sampler, **more)


def reference_texts(files, limits, seed, sampler):
    backend = ReferenceBackend(Device("reference:0"), dtype="float64")
    runner = local_runner(backend, MODEL, files, LIMITS, dtype="float64")
    return play(runner, traffic(limits, seed, sampler).frames(STEPS))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_tokens_equal_the_float64_reference(made, files, sampler):
    limits = made.runner.limits
    frames = [f for f in traffic(limits, 4, sampler).frames(STEPS) if f.takes]
    mixed = [f for f in frames if f.decoding and f.tokens > len(f.takes)]
    padded = [f for f in frames if header(f.message).tokens > f.tokens]
    assert len(mixed) >= 30
    assert len(padded) >= 30
    texts = play(made.runner, traffic(limits, 4, sampler).frames(STEPS))
    assert sum(map(len, texts.values())) > 100
    assert texts == reference_texts(files, limits, 4, sampler)


def test_greedy_tokens_equal_an_uncached_computation(made, files, capsys):
    source = traffic(made.runner.limits, 5, "greedy")
    texts = play(made.runner, source.frames(STEPS))
    tensors = {name: files.tensor(name).data for name in files.names()}
    gaps = []
    for name, tokens in texts.items():
        ids = source.prompts[name] + tokens
        logits = plain_logits(files.config, tensors, ids[:-1])[-len(tokens) :]
        assert tokens == list(logits.argmax(-1))
        best = np.sort(logits, -1)[:, -2:]
        gaps += list(best[:, 1] - best[:, 0])
    with capsys.disabled():
        print(f"\n{len(gaps)} tokens, smallest gap of the best two {min(gaps):.2g}")


def test_a_dropped_row_of_feedback_changes_the_text(jax_module, files):
    """The comparison above can fail: the last token chosen is not remembered."""

    def forgetful(logits, step, tables, *, sampler):
        return jax_module.sample(logits, step, tables, sampler=sampler)[0], tables

    wrong = Made(jax_module, files, {"sample": forgetful})
    limits = wrong.runner.limits
    texts = play(wrong.runner, traffic(limits, 4, "greedy").frames(12))
    right = reference_texts(files, limits, 4, "greedy")
    assert any(tokens != right[name][: len(tokens)] for name, tokens in texts.items())


def calls_to_the_host(lowered):
    """Every custom call of a program, before and after XLA's passes."""
    before = re.findall(r"custom_call @(\w+)", lowered.as_text())
    after = re.findall(r'custom_call_target="([^"]+)"', lowered.compile().as_text())
    return before + after


def test_no_program_calls_the_host(made):
    for bucket in made.runner.limits.buckets:
        assert calls_to_the_host(made.lowered(bucket)) == []
    made.runner.executor.program("set_token_bias", Bucket(1, 1))
    for name, frame in (
        (
            "admit",
            release_frame(1, groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq)[
                None
            ],
        ),
        ("set_token_bias", token_bias_frame(1, ())),
    ):
        message = made.backend.tensor(wrap(frame))
        lowered = made.programs[name].lower(message, made.runner.executor.state)
        assert calls_to_the_host(lowered) == []


def test_a_host_callback_is_found(jax_module, files):
    import jax

    def hosted(gate, up, *, activation):
        result = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
        return jax.pure_callback(lambda g, u: np.asarray(g * u), result, gate, up)

    planted = Made(jax_module, files, {"gated_activation": hosted})
    found = calls_to_the_host(planted.lowered(Bucket(1, 1)))
    assert any("callback" in name for name in found)


def dots(lowered):
    return re.findall(r"stablehlo\.dot_general.*", lowered.as_text())


def test_every_product_is_of_the_highest_precision(made):
    for bucket in made.runner.limits.buckets:
        products = dots(made.lowered(bucket))
        assert len(products) == LAYERS * 9 + 1
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_a_product_of_default_precision_is_found(jax_module, files):
    planted = Made(jax_module, files, {"linear": lambda x, w: x @ w.weight.T})
    products = dots(planted.lowered(Bucket(1, 1)))
    loose = [line for line in products if "[HIGHEST, HIGHEST]" not in line]
    assert len(loose) == LAYERS * 7 + 1


def aliased(text):
    """Outputs that live in an argument's buffer."""
    return len(re.findall(r"\{\d+\}: \(\d+, \{\}, (?:may|must)-alias\)", text))


def copies(text):
    """Instructions that copy or transpose as many elements as a cache part has."""
    size = LIMITS.blocks[0] * BLOCK * 4 * 8
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    return [dims for dims in moved if math.prod(map(int, dims.split(","))) == size]


def test_the_state_is_donated_and_no_cache_is_copied(made):
    import jax

    for bucket in made.runner.limits.buckets:
        text = made.lowered(bucket).compile().as_text()
        state = made.runner.executor.state
        assert aliased(text) == len(jax.tree.leaves(state)) == 2 * LAYERS + 7
        assert copies(text) == []
    weights, message, state = made.arguments(Bucket(1, 1))
    addresses = [part.unsafe_buffer_pointer() for part in jax.tree.leaves(state)]
    _, fresh = made.programs[Bucket(1, 1)](weights, message, state)
    made.runner.executor.state = fresh
    assert all(part.is_deleted() for part in jax.tree.leaves(state))
    assert not any(part.is_deleted() for part in jax.tree.leaves((weights, fresh)))
    found = [part.unsafe_buffer_pointer() for part in jax.tree.leaves(fresh)]
    assert found == addresses


def around_a_reshape(k, v, cache, writes):
    def put(part, fresh):
        flat = part.reshape(-1, *part.shape[2:])
        return flat.at[writes].set(fresh).reshape(part.shape)

    return Cache(put(cache.k, k), put(cache.v, v))


@pytest.mark.parametrize(
    ("replaced", "donate"),
    [({"write_kv": around_a_reshape}, True), ({}, False)],
    ids=["a reshape around the scatter", "no donation"],
)
def test_a_copied_cache_is_found(jax_module, files, replaced, donate):
    planted = Made(jax_module, files, replaced, donate)
    text = planted.lowered(Bucket(1, 1)).compile().as_text()
    assert len(copies(text)) >= 2 * LAYERS
    assert bool(aliased(text)) == donate


def test_compilations_are_no_more_than_buckets(jax_module, files, capsys):
    """300 mixed steps of all samplers; admissions and marks are counted apart."""
    with counted_compilations() as admission:
        fresh = Made(jax_module, files)
        runner = fresh.runner
        warm = traffic(runner.limits, 1, "sample_filtered").frames(1)
        runner.submit(next(warm).message)
        runner.submit(next(warm).message)
        runner._apply_admissions()
        for slot in (1, 2):
            runner.submit(
                release_frame(
                    slot, groups=1, max_blocks_per_seq=LIMITS.max_blocks_per_seq
                )
            )
        runner._apply_admissions()
    with counted_compilations() as steps:
        for seed, sampler in enumerate(SAMPLERS, start=1):
            play(runner, traffic(runner.limits, seed, sampler).frames(100))
            play(runner, traffic(runner.limits, seed, sampler, max_rows=1).frames(20))
    called = [bucket for bucket in fresh.calls if bucket is not None]
    with capsys.disabled():
        print(
            f"\ncompilations: {len(admission)} for admissions, {len(steps)} for "
            f"{len(called)} steps; buckets: {len(runner.limits.buckets)}"
        )
    assert len(called) == 360
    # Of one frame and of many, and marks.
    assert len(admission) == 3
    assert len(steps) == len(set(called)) == len(runner.limits.buckets)
    sizes = {name: each._cache_size() for name, each in fresh.programs.items()}
    assert sizes.pop("admit") == 2
    assert set(sizes.values()) == {1}


def test_the_count_of_compilations_can_rise(jax_module):
    import jax
    import jax.numpy as jnp

    program = jax.jit(lambda x: x * 3 + 1)
    arrays = [jnp.array(np.ones(size, np.float32)) for size in (5, 5, 6)]
    with counted_compilations() as seen:
        for array in arrays:
            program(array)
    assert len(seen) == program._cache_size() == 2


def test_bfloat16_bits_are_those_of_ml_dtypes(jax_module):
    """Our own rounding against the library that JAX rounds with."""
    import ml_dtypes

    from inl.dtypes import cast, widen

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    halves = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    for values in (bits.view(np.float32), halves.view(np.float32)):
        values = values[~np.isnan(values)]
        found = cast(values, "bfloat16")
        assert (found.data == values.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
        assert (widen(found) == values.astype(ml_dtypes.bfloat16)).all()
