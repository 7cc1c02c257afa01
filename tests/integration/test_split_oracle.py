"""The oracle's answers where one engine computes prompts and another decodes.

With the default model, blocks of other sizes on both sides, and other vendors.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depth import scaled
from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model, resolve_model
from inl.engine import remote_prefill
from inl.executor.model_loader import open_model
from inl.kv_transfer import spans
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.testing.near_tie import compare
from vendor_backends import MAKERS

ORACLE = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2-oracle.json").read_text("utf-8")
)["cases"]
CASES = scaled(ORACLE[6:8], [ORACLE[0], *ORACLE[6:8]], ORACLE)
CONTEXT = 128


@pytest.fixture(autouse=True)
def platforms(monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
    monkeypatch.setattr(remote_prefill, "LEAST_TOKENS", 8)


@pytest.fixture
def engine_of():
    """Makes an engine of the default model on a backend; closes it."""
    made = []

    def make(name, size, dtype, **settings):
        language = open_model(resolve_model(default_model()))
        config = EngineConfig(dtype=dtype, context=CONTEXT, max_batch=9, **settings)
        limits = Limits(
            slots=10, blocks=(10 * CONTEXT // size,), block_size=size,
            max_blocks_per_seq=CONTEXT // size, vocab=language.config.vocab_size,
            token_budget=64, sampler="greedy", depth=1,
        )  # fmt: skip
        runner = start_runner(language, MAKERS[name](), config, limits=limits)
        made.append(InferenceEngine(language, config=config, runner=runner))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


PAIRS = [
    ("torch", 4, "cpu", 8, "float32"),
    pytest.param("cpu", 8, "torch", 4, "float32", marks=pytest.mark.full),
    pytest.param("torch", 4, "cpu", 8, "bfloat16", marks=pytest.mark.long),
    # JAX compiles for a minute.
    pytest.param("jax", 16, "torch", 8, "float32", marks=pytest.mark.long),
]


def split_answers(engine_of, cases, there, size, here, own, dtype):
    """Answers of cases, and how many tokens of each prompt have arrived."""
    far = engine_of(there, size, dtype, role="prefill", kv_peer="127.0.0.1:0")
    near = engine_of(
        here, own, dtype, role="decode", kv_host="256MiB",
        kv_peer=far.prefill_port.address,
    )  # fmt: skip
    found, arrived = [], []
    for case in cases:
        answer = near.generate(
            case["prompt_ids"], max_tokens=len(case["token_ids"]), temperature=0
        )
        found.append(list(answer.token_ids))
        arrived.append(answer.cached_tokens)
    counts = near.remote_prefill.counts
    assert counts["done"] == sum(len(each["prompt_ids"]) // own * own >= 8
                                 for each in cases)  # fmt: skip
    assert not counts["damaged"] + counts["failed"] + counts["foreign"]
    return found, arrived


@pytest.mark.parametrize(("there", "size", "here", "own", "dtype"), PAIRS)
def test_answers_are_the_oracles(engine_of, there, size, here, own, dtype, capsys):
    found, arrived = split_answers(engine_of, CASES, there, size, here, own, dtype)
    compared = [
        compare(answer, case["token_ids"], case["margins"])
        for answer, case in zip(found, CASES, strict=True)
    ]
    equal = sum(each.gap is None for each in compared)
    with capsys.disabled():
        print(f"\n{there} to {here}, {dtype}: {equal} of {len(CASES)}, {arrived}")
    for tokens, case in zip(arrived, CASES, strict=True):
        count = len(case["prompt_ids"])
        whole = count // size * size // own * own
        assert tokens == min(whole, (count - 1) // own * own)
    if dtype == "float32":
        assert equal == len(CASES)
    assert all(each.allowed(dtype) for each in compared)


def test_a_block_that_is_cut_wrong_gives_other_answers(engine_of, monkeypatch):
    def beside(self, span):
        found = list(add(self, span))
        if len(found) > 1:
            found[0] = found[0][0], found[1][1]
        yield from found

    add = spans.Recut.add
    monkeypatch.setattr(spans.Recut, "add", beside)
    cases = ORACLE[6:8]
    found, _ = split_answers(engine_of, cases, "cpu", 8, "cpu", 8, "float32")
    assert any(
        answer != case["token_ids"] for answer, case in zip(found, cases, strict=True)
    )
