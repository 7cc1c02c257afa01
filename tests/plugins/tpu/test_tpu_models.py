"""INL models and a mixture of experts on the TPU's programs, and the default model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend
from inl.checkpoints.hub.resolve import default_model
from inl.device import Device
from inl.executor.model_loader import open_model
from inl.models.mixtral import MODEL
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl.speculation.drafters import SyntheticDrafter
from inl.testing.near_tie import compare
from inl.testing.tiny import MemoryCheckpoint, local_runner
from inl.testing.traffic import Traffic, play
from inl.weights.sources import stored_tensors

TOKENS = 12
ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"
MIXTRAL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LIMITS = Limits(
    slots=5,
    blocks=(61,),
    block_size=4,
    max_blocks_per_seq=12,
    vocab=61,
    sampler="greedy",
)


@pytest.mark.parametrize("version", ["inl-v013", "inl-v040"])
def test_inl_models_give_their_recorded_answers(
    tpu_backend, recorded, answered, version
):
    known = recorded(version, tpu_backend)
    assert answered(known.core(), known.prompts, 24) == known.greedy


def test_a_mixture_of_experts_equals_its_float64_reference(tpu_backend):
    rng = np.random.default_rng(5)
    groups = leaves(MODEL.weights(MODEL.config(MIXTRAL)))
    shapes = {}
    for group in groups:
        for param in group.params.values():
            shapes |= stored_tensors(param)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        for name, shape in sorted(shapes.items())
    }
    files = MemoryCheckpoint(MIXTRAL, tensors)
    runner = local_runner(tpu_backend, MODEL, files, LIMITS)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    reference = local_runner(exact, MODEL, files, LIMITS, dtype="float64")

    def texts(which):
        source = Traffic(np.random.default_rng(6), runner.limits, sampler="greedy")
        return play(which, source.frames(40))

    found = texts(runner)
    assert sum(map(len, found.values())) > 50
    assert len({token for text in found.values() for token in text}) > 5
    assert found == texts(reference)


def assert_oracle(answers, cases, capsys):
    compared = [
        compare(answer.token_ids, case["token_ids"][:TOKENS], case["margins"])
        for answer, case in zip(answers, cases, strict=True)
    ]
    with capsys.disabled():
        print(f"\n{[c for c in compared if c.gap]} leave the oracle")
    assert all(each.allowed("float32") for each in compared)


@pytest.mark.full
def test_the_default_model_follows_the_oracle(tpu_backend, capsys):
    """Nine answers streamed, one after the other; then in a batch."""
    cases = json.loads(ORACLE.read_text("utf-8"))["cases"]
    language = open_model(default_model())
    config = EngineConfig(dtype="float32", max_batch=9, context=128, sampling="greedy")
    runner = start_runner(language, tpu_backend, config)
    with InferenceEngine(language, config=config, runner=runner) as engine:
        prompts = [case["prompt_ids"] for case in cases]
        pieces = [list(engine.stream(ids, max_tokens=TOKENS)) for ids in prompts]
        answers = engine.generate(prompts, max_tokens=TOKENS)
    assert len(cases) == 9
    for case, parts in zip(cases, pieces, strict=True):
        assert len(parts) > 1
        assert case["text"].startswith("".join(parts))
    assert_oracle(answers, cases, capsys)


@pytest.mark.full
def test_the_default_model_follows_the_oracle_with_speculation(tpu_backend, capsys):
    """Of the drafted tokens, most are right."""
    cases = json.loads(ORACLE.read_text("utf-8"))["cases"]
    prompts = [case["prompt_ids"] for case in cases]
    known = {tuple(case["prompt_ids"]): case["token_ids"] for case in cases}
    language = open_model(default_model())
    config = EngineConfig(
        dtype="float32", max_batch=9, context=128, sampling="greedy",
        speculation="ngram", max_drafts=3, adaptive_drafts=False,
    )  # fmt: skip
    runner = start_runner(language, tpu_backend, config)
    drafter = SyntheticDrafter(known, 0.7)
    parts = {"runner": runner, "drafter": drafter}
    with InferenceEngine(language, None, config, **parts) as engine:
        answers = engine.generate(prompts, max_tokens=TOKENS)
        assert engine.speculation.drafted > engine.speculation.accepted > 20
    assert_oracle(answers, cases, capsys)
