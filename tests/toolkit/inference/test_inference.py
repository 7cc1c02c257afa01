"""The engine under its other names: streams, options, batches, cache, hardware."""

from __future__ import annotations

import pytest

import inl
from inl import EngineConfig, InferenceEngine
from inl.errors import BackendUnavailable, RequestError
from inl.hardware import is_available
from inl.hardware.tpu import TPUBackend, is_tpu_available
from inl.inference import (
    ContinuousBatcher,
    GenerationConfig,
    KVCache,
    SpeculativeDecoder,
    StreamingSession,
)
from inl_toolkit.inference.streaming import units

TEXT = 'He said: "No."  Then 3.5 km!\n\nWhy? e.g. this… end'


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("unit", "exact"),
    [
        ("word", ["He ", "said: ", '"No."  ', "Then ", "3.5 ", "km!\n\n", "Why? ",
                  "e.g. ", "this… ", "end"]),
        ("sentence", ['He said: "No."  ', "Then 3.5 km!\n\n", "Why? ", "e.g. ",
                      "this… ", "end"]),
        ("chunk", [TEXT[i : i + 9] for i in range(0, len(TEXT), 9)]),
    ],
)  # fmt: skip
def test_units_do_not_depend_on_the_pieces(size, unit, exact):
    pieces = (TEXT[i : i + size] for i in range(0, len(TEXT), size))
    assert list(units(pieces, unit, 9)) == exact


@pytest.mark.parametrize("unit", ["token", "word", "sentence", "chunk"])
def test_a_session_streams_the_completion(engines, unit):
    engine = engines()
    want = engine.generate("Hello", max_tokens=30).text
    with StreamingSession(engine, "Hello", unit=unit, max_tokens=30) as session:
        assert "".join(session) == want


def test_closing_a_session_cancels_its_request(engines, drained):
    engine = engines()
    with StreamingSession(engine, "Hello", max_tokens=60) as session:
        next(iter(session))
    assert drained(engine)


def test_a_configuration_is_checked_and_used(engines):
    engine = engines()
    config = GenerationConfig(max_tokens=7, temperature=0.9, seed=3)
    assert dict(config) == {"max_tokens": 7, "temperature": 0.9, "seed": 3}
    found = engine.generate("Hello", **config)
    assert found.token_ids == engine.generate("Hello", **config).token_ids
    assert len(found.token_ids) == 7
    with pytest.raises(RequestError, match="options: found max_length"):
        GenerationConfig(max_length=7)
    with pytest.raises(RequestError, match="temperature"):
        GenerationConfig(temperature=-1)


def test_a_batcher_returns_completions_in_order(engines):
    engine = engines()
    prompts = ["one", "two two", "three"]
    want = [engine.generate(p, max_tokens=n).text for n, p in enumerate(prompts, 3)]
    batcher = ContinuousBatcher(engine)
    for n, prompt in enumerate(prompts, 3):
        batcher.submit(prompt, max_tokens=n)
    assert [completion.text for completion in batcher.run()] == want
    assert batcher.run() == []


def test_the_cache_is_seen(engines):
    engine = engines()
    cache = KVCache(engine)
    (before,), (blocks,) = cache.available_blocks, cache.blocks
    assert 0 < before <= blocks
    handle = engine.submit("a" * 60, max_tokens=4)
    engine.step()
    engine.step()
    (during,) = cache.available_blocks
    assert before - during >= 60 // cache.block_size
    while not handle.completed:
        engine.step()
    engine.generate("x", max_tokens=1)
    assert cache.available_blocks == (before,)
    assert cache.cached_blocks[0] >= 60 // cache.block_size


def test_a_speculative_decoder_is_an_engine_with_the_same_answers(engines):
    plain = engines()
    config = EngineConfig(backend="reference", context=96, adaptive_drafts=False)
    with SpeculativeDecoder(plain.model, None, plain.tokenizer, config) as engine:
        assert engine.config.speculation == "ngram"
        found = engine.generate("ab ab ab ab", max_tokens=20)
    want = plain.generate("ab ab ab ab", max_tokens=20)
    assert found.token_ids == want.token_ids


def test_what_is_not_there_is_refused():
    with pytest.raises(RequestError, match="unit: found 'letter'"):
        StreamingSession(None, "x", unit="letter")
    assert inl.inference.InferenceEngine is InferenceEngine


def test_an_absent_tpu():
    if is_tpu_available():
        pytest.skip("a TPU is here")
    assert not is_available("tpu")
    tpu = TPUBackend()
    assert tpu.initialize() is False
    assert tpu.why_not()
    with pytest.raises(BackendUnavailable, match="tpu:0: is not open: "):
        tpu.memory()


def test_transfers_are_counted(monkeypatch):
    import numpy as np

    from inl.device import Device
    from inl.plugin import make_backend

    monkeypatch.setattr("inl.plugin.make_backend", lambda _: make_backend(HERE))
    HERE = Device("reference")
    tpu = TPUBackend()
    assert tpu.initialize()
    x = np.arange(6, dtype=np.float32)
    assert tpu.to_host(tpu.to_device(x)).tolist() == x.tolist()
    assert tpu.transfers == (1, 1, 24, 24)
    assert tpu.memory().total > 0
    assert tpu.pool == (0, 0, 24)
    held = [tpu.to_device(x), tpu.to_device(x[:2])]
    assert tpu.pool == (2, 32, 32)
    del held[0]
    assert tpu.pool == (1, 8, 32)
    tpu.to_device(x[:1])
    assert tpu.pool == (1, 8, 32)
