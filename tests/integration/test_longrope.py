"""LongRoPE: the context that an engine is made for selects the factors."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest

from inl import EngineConfig, InferenceEngine
from inl.errors import CheckpointError
from inl.executor.load_plan import configure
from inl.executor.model_loader import longest_context, open_model
from inl.testing.near_tie import compare

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
families = importlib.import_module("families")

ORIGINAL, LONGEST = 16, 64
FIELDS = {
    "max_position_embeddings": LONGEST, "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return families.make("phi3-long", tmp_path_factory.mktemp("longrope"), **FIELDS)


def expected(made, ids):
    model = transformers.Phi3ForCausalLM.from_pretrained(
        made.path, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def found(made, ids, context, cuts=()):
    language = configure(open_model(made.path), EngineConfig(context=context))
    runner = families.load(language, families.reference(), "float64")
    return families.logits(runner, ids, cuts)


def test_a_longer_context_uses_the_long_factors(made):
    """At once and token by token, also the tokens before the original length."""
    long = expected(made, made.ids)
    for cuts in [(), (9, *range(10, families.TOKENS))]:
        assert families.distance(found(made, made.ids, 48, cuts), long) < 1e-4
    short = made.ids[:ORIGINAL]
    assert families.distance(found(made, short, 48), expected(made, short)) > 1e-3


def test_the_original_context_uses_the_short_factors(made):
    short = made.ids[:ORIGINAL]
    for context in (ORIGINAL, 5, None):
        assert families.distance(found(made, short, context), expected(made, short)) < (
            1e-4
        )


def test_contexts_are_those_of_the_config(made):
    language = open_model(made.path)
    assert (language.config.max_tokens, longest_context(language)) == (16, LONGEST)
    assert configure(language, EngineConfig(context=40)).config.max_tokens == 40
    assert configure(language, EngineConfig(context=999)).config.max_tokens == LONGEST


def test_an_engine_answers_beyond_the_original_context(made):
    config = EngineConfig(backend="cpu", dtype="float32", context=60, max_batch=2)
    prompt = made.ids[:30]
    with InferenceEngine(open_model(made.path), config=config) as engine:
        (answer,) = engine.generate([prompt], max_tokens=12, ignore_eos=True)
    logits = torch.tensor(expected(made, [*prompt, *answer.token_ids]))[29:-1]
    top = logits.double().topk(2, -1)
    gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
    compared = compare(answer.token_ids, top.indices[:, 0].tolist(), gaps)
    assert compared.allowed("float32"), compared


def test_long_factors_of_another_number_are_refused(made, tmp_path):
    config = json.loads((made.path / "config.json").read_text())
    config["rope_parameters"]["long_factor"] = [1.0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(made.path / "model.safetensors", tmp_path)
    message = r"rope_scaling\.long_factor.*expected 3 numbers"
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path)
