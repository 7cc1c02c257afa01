"""Engines of different backends in one fleet: native kernels, torch and JAX."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest

from byte_tokens import byte_rules
from fleets import EngineProcess, Fleet, answered
from inl.fleet.client import FleetClient
from inl.serve.frontends.messages import News
from waiting import until

BACKENDS = {
    "native": ({"INL_CPU": "native"}, "cpu:0"),
    "torch": ({"INL_CPU": "torch"}, "cpu:0"),
    "jax": ({"INL_TPU_PLATFORM": "cpu"}, "tpu:0"),
}
PART = 40
"""Tokens after which an engine is lost."""
GREEDY = {"prompt": [5, 9, 20], "max_tokens": 120, "temperature": 0, "seed": 1}
SAMPLED = {**GREEDY, "temperature": 0.9, "top_p": 0.9, "seed": 7}
OPTIONS = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One engine of each backend on a random model, in float32."""
    pytest.importorskip("jax")
    families = pytest.importorskip("families")
    folder = tmp_path_factory.mktemp("model")
    families.make("llama3", folder, vocab_size=256, max_position_embeddings=512)
    byte_rules().save(str(folder / "tokenizer.json"))
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                EngineProcess(
                    environment, is_real=True, model=str(folder), max_batch=2,
                    config={"backend": device, "dtype": "float32", "context": 128},
                )
            )
            for name, (environment, device) in BACKENDS.items()
        }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("body", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_goes_on_from_one_backend_to_the_next(engines, body, monkeypatch):
    addresses = [each.address for each in engines.values()]
    alone = []
    for address in addresses:
        with Fleet([address]) as fleet:
            alone.append(answered(fleet, body | OPTIONS))
    assert alone[1:] == alone[:1] * 2, "their arithmetic is as good as the same"
    with Fleet(addresses) as fleet:
        until(lambda: len(fleet.client.members.by_number) == len(addresses))
        used = lose_each(fleet.client, monkeypatch)
        assert answered(fleet, body | OPTIONS) == alone[0]
        assert sorted(used) == sorted(addresses), "each has generated a part"
        until(lambda: fleet.counts["continued"] == len(addresses) - 1)
        assert not fleet.counts["diverged"]
        assert not fleet.counts["refused"]


def lose_each(client, monkeypatch):
    """Lose what an engine sends after some tokens, and the engine, but the last one.

    Returns the addresses of those that have sent tokens.
    """
    counts = Counter()

    def received(client, engine, message):
        if not isinstance(message, News) or not message.numbers:
            RECEIVED(client, engine, message)
            return
        (tokens,) = message.tokens
        room = PART - counts[engine.address]
        counts[engine.address] += len(tokens)
        if len(tokens) < room or len(counts) == len(BACKENDS):
            RECEIVED(client, engine, message)
            return
        message.tokens[0], message.ends[:] = tokens[:room], ()
        RECEIVED(client, engine, message)
        client.hold(engine, is_held=True)
        client.abandon(engine)

    monkeypatch.setattr(FleetClient, "received", received)
    return counts


RECEIVED = FleetClient.received
