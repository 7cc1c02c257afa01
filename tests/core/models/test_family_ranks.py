"""Every family over two ranks or stages: tokens as on one device.

The ranks do not divide its vocabulary.
"""

from __future__ import annotations

import importlib

import pytest

from inl import EngineConfig
from inl.errors import WeightMismatch
from inl.executor.model_loader import LanguageModel
from inl.placement.mesh import EXPERT_OPS
from inl.plugin.builtin import FAMILIES
from inl.spec.cache import Slotted
from inl.spec.tree import leaves
from rank_engines import over

NAMES = sorted({module for _, _, module in FAMILIES})
IDS = [3, 17, 60, 2, 41, 41, 9, 77, 94, 30]
CONFIG = EngineConfig(backend="reference", dtype="float64", max_batch=4, context=32)
LATENT, WHOLE, RECURRENT, MAMBA = (
    "found 1 key-value heads for 2 ranks",
    "normalizes all heads together, accepted: 1 rank",
    "recurrent state conv.0: found 2 ranks",
    "recurrent state mamba.0.inputs: found 2 ranks",
)
REFUSED = {
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "glm4_moe_lite": LATENT,
    "deepseek_v32": LATENT, "glm_moe_dsa": LATENT, "youtu": LATENT,
    "minicpm3": LATENT, "axk1": LATENT, "flex_olmo": WHOLE,
    "gemma3n": "compares all with their mean, accepted: 1 rank",
    "olmo2": WHOLE, "olmo3": WHOLE,
    "olmoe": WHOLE, "minimax_m2": WHOLE,
    "qwen3_5": RECURRENT, "qwen3_5_moe": RECURRENT, "qwen3_next": RECURRENT,
    "lfm2": RECURRENT, "lfm2_moe": RECURRENT, "granite_hybrid": MAMBA,
    "bamba": MAMBA, "falcon_h1": MAMBA, "nemotron_h": MAMBA,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_the_probabilities_of_one(name, random_checkpoint):
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_checkpoint(model, name, vocab_size=95)
    language = LanguageModel(model, model.config(files.config), files)
    if name in REFUSED:
        with pytest.raises(WeightMismatch, match=REFUSED[name]):
            over(language, 2, CONFIG).close()
        return
    found = []
    for ranks in (1, 2):
        with over(language, ranks, CONFIG) as engine:
            found.append(engine.generate(IDS, max_tokens=5, logprobs=20))
    one, two = found
    assert two.token_ids == one.token_ids
    for mine, theirs in zip(two.logprobs, one.logprobs, strict=True):
        assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_stages_compute_the_probabilities_of_one(name, random_checkpoint):
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_checkpoint(model, name, vocab_size=95)
    language = LanguageModel(model, model.config(files.config), files)
    state = model.state(language.config)
    refusal = ""
    if any(isinstance(item, Slotted) for item in state):
        refusal = "state "
    elif sum(len(item.layers) for item in state) < language.config.layers:
        refusal = "caches of 2 layers, shared by 4"
    if refusal:
        with pytest.raises(WeightMismatch, match=f"{refusal}.*: found pipeline=2; acc"):
            over(language, 1, CONFIG, 2).close()
        return
    found = []
    for stages in (1, 2):
        with over(language, 1, CONFIG, stages) as engine:
            found.append(engine.generate(IDS, max_tokens=5, logprobs=20))
    one, two = found
    assert two.token_ids == one.token_ids
    assert two.logprobs == one.logprobs


def has_experts(model, config):
    return any(group.op in EXPERT_OPS for group in leaves(model.weights(config)))


@pytest.mark.parametrize("name", NAMES)
def test_experts_on_two_ranks_compute_the_probabilities_of_one(name, random_checkpoint):
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_checkpoint(model, name, vocab_size=95)
    language = LanguageModel(model, model.config(files.config), files)
    if not has_experts(model, language.config):
        with pytest.raises(
            WeightMismatch, match="found expert=2, but the model has no"
        ):
            over(language, 1, CONFIG, experts=2).close()
        return
    found = []
    for sizes in ({}, {"experts": 2}, {"rows": 2}):
        with over(language, 1, CONFIG, **sizes) as engine:
            found.append(engine.generate(IDS, max_tokens=5, logprobs=20))
    one, *others = found
    for two in others:
        assert two.token_ids == one.token_ids
        for mine, theirs in zip(two.logprobs, one.logprobs, strict=True):
            assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-9)
