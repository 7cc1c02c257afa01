"""Prompts and running requests between backends of other vendors: the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from inl import EngineConfig, InferenceEngine
from inl.engine import remote_prefill
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from rank_engines import runner_over
from vendor_backends import MAKERS

VOCAB, CONTEXT = 256, 192
PROMPT = [(7 * at) % 250 for at in range(100)]


@pytest.fixture(autouse=True)
def platforms(monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", "cpu")


@pytest.fixture(scope="module")
def tensors():
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2)


@pytest.fixture
def engine_of(tensors):
    """Makes an engine on a backend with blocks of a size; closes it."""
    made = []

    def make(name, size, dtype="float32", **settings):
        checkpoint = MemoryCheckpoint(*tensors)
        language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
        config = EngineConfig(dtype=dtype, context=CONTEXT, max_batch=2, **settings)
        limits = Limits(
            slots=3, blocks=(3 * CONTEXT // size,), block_size=size,
            max_blocks_per_seq=CONTEXT // size, vocab=VOCAB, token_budget=64,
            sampler="sample_filtered", depth=1,
        )  # fmt: skip
        if name == "ranks":
            runner = runner_over(language, 2, config, limits=limits)
        else:
            runner = start_runner(language, MAKERS[name](), config, limits=limits)
        engine = InferenceEngine(language, bytes_as_tokens(), config, runner=runner)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


OPTIONS = [{"temperature": 0}, {"temperature": 0.9, "seed": 3}]
PAIRS = [
    ("torch", 16, "cpu", 32), ("onnx", 16, "cpu", 16),
    # Two tensor ranks of one side.
    ("ranks", 16, "cpu", 32), ("cpu", 32, "ranks", 16),
    # JAX compiles for seconds.
    pytest.param("jax", 16, "torch", 16, marks=pytest.mark.full),
    pytest.param("cpu", 32, "jax", 16, marks=pytest.mark.full),
]  # fmt: skip


def pair(engine_of, there, size, here, own):
    far = engine_of(there, size, role="prefill", kv_peer="127.0.0.1:0")
    near = engine_of(
        here, own, role="decode", kv_peer=far.prefill_port.address, kv_host="64MiB"
    )
    return far, near


@pytest.mark.parametrize(("there", "size", "here", "own"), PAIRS)
def test_a_prompt_is_computed_by_another_vendor(engine_of, there, size, here, own):
    alone = engine_of("reference", 16, prefix_cache=False)
    _, near = pair(engine_of, there, size, here, own)
    for turn, options in enumerate(OPTIONS):
        prompt = PROMPT[turn:] + PROMPT[:turn]
        found = near.generate(prompt, max_tokens=12, **options)
        wanted = alone.generate(prompt, max_tokens=12, **options)
        assert found.token_ids == wanted.token_ids
        assert found.cached_tokens == 96
    assert near.remote_prefill.counts["done"] == len(OPTIONS)


@pytest.mark.parametrize(("there", "size", "here", "own"), [*PAIRS[:1], *PAIRS[2:5]])
def test_a_running_request_goes_to_another_vendor(engine_of, there, size, here, own):
    alone = engine_of("reference", 16, prefix_cache=False)
    one = engine_of(there, size)
    two = engine_of(here, own, kv_host="64MiB")
    for options in OPTIONS:
        wanted = alone.generate(PROMPT, max_tokens=40, **options)
        handle = one.submit(PROMPT, max_tokens=40, **options)
        while len(handle.token_ids) < 30:
            one.step()
        again = two.import_request(one.export_request(handle))
        assert again.result().token_ids == wanted.token_ids
        # 129 tokens were known.
        assert again.request.cached_tokens == 128


def test_all_is_encrypted_between_hosts(engine_of, monkeypatch):
    """As between hosts, on this one: with TLS and a secret."""
    from inl.engine import link_port
    from inl.kv_transfer import link

    for module in (link_port, link):
        monkeypatch.setattr(module, "is_encrypted", lambda _: True)
    monkeypatch.setenv("INL_WORKER_SECRET", "ab" * 32)
    far, near = pair(engine_of, "reference", 16, "reference", 16)
    found = near.generate(PROMPT, max_tokens=4, temperature=0)
    assert found.cached_tokens == 96
    assert near.remote_prefill.counts["done"] == 1
    # An engine of the prefilling engine's own host sends plain bytes.
    for module in (link_port, link):
        monkeypatch.setattr(module, "is_encrypted", lambda _: False)
    near.generate(PROMPT[1:], max_tokens=4, temperature=0)
    assert near.remote_prefill.counts["done"] == 2
    monkeypatch.setattr(link_port, "is_encrypted", lambda _: True)
    near.generate(PROMPT[2:], max_tokens=4, temperature=0)
    assert near.remote_prefill.counts["failed"] == 1
    monkeypatch.setattr(link, "is_encrypted", lambda _: True)
    far.prefill_port._secret = b"\0" * 32
    near.remote_prefill._away[near.remote_prefill._addresses[0]] = 0.0
    near.generate(PROMPT[::-1], max_tokens=4, temperature=0)
    assert near.remote_prefill.counts["failed"] == 2
    monkeypatch.delenv("INL_WORKER_SECRET")
    with pytest.raises(remote_prefill.DeviceError, match="found no secret"):
        engine_of("reference", 16, role="prefill", kv_peer="127.0.0.1:0")
