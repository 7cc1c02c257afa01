"""State that every token changes goes to other engines, and to other vendors.

For models with recurrent layers beside attention: prompts that another engine computes,
and running requests that move, have the tokens of an engine alone, in float64.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from plain_byte_tokens import plain_bytes_as_tokens
from random_families import random_family
from vendor_backends import MAKERS

VOCAB, CONTEXT = 256, 160
NAMES = "lfm2", "granite_hybrid", "qwen3_next", "falcon_h1", "nemotron_h", "qwen3_5_moe"
PROMPTS = [
    np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    for seed, count in enumerate((85, 96, 129))
]
OPTIONS = [{"temperature": 0}, {"temperature": 0.9, "seed": 3}]


@pytest.fixture(autouse=True)
def platforms(monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")


@pytest.fixture
def engine_of():
    """Makes an engine of a family on a backend with blocks of a size; closes it."""
    made = []

    def make(name, backend, size=16, dtype="float32", **settings):
        model = importlib.import_module(f"inl.models.{name}").MODEL
        files = random_family(model, name, vocab_size=VOCAB)
        language = LanguageModel(model, model.config(files.config), files)
        config = EngineConfig(dtype=dtype, context=CONTEXT, max_batch=2, **settings)
        limits = Limits(
            slots=3, blocks=(3 * CONTEXT // size,), block_size=size,
            max_blocks_per_seq=CONTEXT // size, vocab=VOCAB, token_budget=32,
            sampler="sample_filtered", depth=1,
        )  # fmt: skip
        runner = start_runner(language, MAKERS[backend](), config, limits=limits)
        tokens = plain_bytes_as_tokens()
        engine = InferenceEngine(language, tokens, config, runner=runner)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


PAIRS = ("torch", 16, "cpu", 32), ("cpu", 32, "torch", 16), ("cpu", 16, "cpu", 16)
COMPILED = "jax", 16, "torch", 32
"""JAX compiles for seconds."""


def cases():
    """The first two families over every pair but JAX's at quick depth; at full depth
    each other family over one pair, and JAX with two families; at long depth all.
    """
    for at, name in enumerate(NAMES):
        for pair, own in enumerate(PAIRS):
            kept = pytest.mark.full if pair == at % len(PAIRS) else pytest.mark.long
            yield pytest.param(name, *own, marks=() if at < 2 else kept)
        compiled = name in ("granite_hybrid", "qwen3_next")
        marks = pytest.mark.full if compiled else pytest.mark.long
        yield pytest.param(name, *COMPILED, marks=marks)


@pytest.mark.parametrize(("name", "there", "size", "here", "own"), list(cases()))
def test_a_prompt_is_computed_by_another_engine(
    engine_of, name, there, size, here, own
):
    alone = engine_of(name, "reference", dtype="float64")
    far = engine_of(name, there, size, role="prefill", kv_peer="127.0.0.1:0")
    near = engine_of(
        name, here, own, role="decode", kv_peer=far.prefill_port.address,
        kv_host="64MiB",
    )  # fmt: skip
    for prompt in PROMPTS:
        for options in OPTIONS:
            wanted = alone.generate(prompt, max_tokens=10, **options)
            found = near.generate(prompt, max_tokens=10, **options)
            assert found.token_ids == wanted.token_ids
            assert found.cached_tokens == len(prompt) - 1
    assert near.remote_prefill.counts["done"] == len(PROMPTS) * len(OPTIONS)


@pytest.mark.parametrize(("name", "there", "size", "here", "own"), list(cases()))
def test_a_running_request_goes_on_elsewhere(engine_of, name, there, size, here, own):
    alone = engine_of(name, "reference", dtype="float64")
    one, two = engine_of(name, there, size), engine_of(name, here, own)
    for options in OPTIONS:
        wanted = alone.generate(PROMPTS[0], max_tokens=40, **options)
        handle = one.submit(PROMPTS[0], max_tokens=40, **options)
        while len(handle.token_ids) < 17:
            one.step()
        moved = one.export_request(handle)
        again = two.import_request(type(moved).from_bytes(moved.to_bytes()))
        assert again.result().token_ids == wanted.token_ids
        # All that was known but the last token.
        known = len(PROMPTS[0]) + len(moved.output_ids)
        assert again.request.cached_tokens == known - 1


def test_without_the_slot_other_tokens_come(engine_of, monkeypatch):
    """The state matters in these models: blocks alone give another answer."""
    from inl.engine import core

    write = core.write_carried

    def blocks_only(runner, request, state, recorder):
        from dataclasses import replace

        from inl.dtypes import HostArray

        slot = {
            name: HostArray(np.zeros_like(part.data), part.dtype, part.shape)
            for name, part in state.slot.items()
        }
        write(runner, request, replace(state, slot=slot), recorder)

    monkeypatch.setattr(core, "write_carried", blocks_only)
    with pytest.raises(AssertionError):
        test_a_running_request_goes_on_elsewhere(
            engine_of, "lfm2", "cpu", 16, "cpu", 16
        )
