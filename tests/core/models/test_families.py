"""Every family on NumPy alone: over ranks, and through the engine."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from depth import mostly_full
from inl import EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend
from inl.checkpoints.gguf import names as gguf_names
from inl.device import Device
from inl.errors import CheckpointError, RunnerError, WeightMismatch
from inl.executor.model_executor import SIZE_CLASSES
from inl.executor.model_loader import LanguageModel
from inl.plugin import registry
from inl.plugin.builtin import FAMILIES
from inl.spec.cache import Paged
from inl.spec.limits import Limits
from inl.testing.tiny import local_runner, reference_ranks
from inl.testing.traffic import Traffic, play

DEVICE = Device("reference:0")
NAMES = sorted({module for _, _, module in FAMILIES})
STEPS = 30
RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "bamba", "falcon_h1",
    "granite_hybrid", "nemotron_h",
)  # fmt: skip
WIDE_NORMS = ("olmo2", "olmo3", "olmoe", "minimax_m2", "flex_olmo")
ONE_RANK = (
    *WIDE_NORMS, "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_bigcode", "youtu", "minicpm3", "axk1", "gemma3n",
    *RECURRENT,
)  # fmt: skip
"""Families that normalize all queries at once or compare all gates with their mean,
whose cache has one head, or with recurrent state."""


def model_of(name):
    return importlib.import_module(f"inl.models.{name}").MODEL


def limits_of(model, files):
    groups = sum(isinstance(g, Paged) for g in model.state(model.config(files.config)))
    return Limits(
        slots=6, blocks=(60,) * groups, block_size=4, max_blocks_per_seq=12, vocab=96
    )


@pytest.mark.parametrize("name", mostly_full(NAMES, 4))
def test_two_ranks_equal_one(name, random_checkpoint):
    model = model_of(name)
    files = random_checkpoint(model, name)
    limits = limits_of(model, files)

    def texts(runner):
        found = play(runner, Traffic(np.random.default_rng(2), limits).frames(STEPS))
        runner.close()
        return found

    backend = ReferenceBackend(DEVICE, dtype="float64")
    alone = texts(local_runner(backend, model, files, limits, dtype="float64"))
    assert len({token for text in alone.values() for token in text}) > 5
    make = (DEVICE, model, files, limits)
    if name in ONE_RANK:
        refusal = r"accepted: (1 rank|a number of ranks that divides 1\b)"
        with pytest.raises((WeightMismatch, RunnerError), match=refusal):
            reference_ranks(*make, ranks=2, dtype="float64")
    else:
        assert texts(reference_ranks(*make, ranks=2, dtype="float64")) == alone


@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs_on_strict_arrays(name, random_checkpoint):
    """The model uses supported operations only, with the same ops in every bucket.

    Except for the last layer, which is pruned if not all tokens are sampled.
    """
    model = model_of(name)
    files = random_checkpoint(model, name)
    backend = ReferenceBackend(DEVICE)
    runner = local_runner(backend, model, files, limits_of(model, files))
    counts = {True: set(), False: set()}
    for bucket in SIZE_CLASSES:
        calls = sum(runner.executor.tracer(bucket).counts.values())
        counts[bucket.rows == bucket.tokens].add(calls)
    assert len(counts[True]) == len(counts[False]) == 1


@pytest.mark.parametrize(
    "name",
    mostly_full(
        [
            "mistral",
            "glm_moe_dsa",
            "qwen3_next",
            "gemma3",
            "gemma4",
            "lfm2",
            "nemotron_h",
            "deepseek_v32",
            "gemma3n",
        ],
        2,
    ),
)
def test_answers_do_not_depend_on_batching(name, random_checkpoint, byte_tokenizer):
    """Prefix cache, preemption and chunks against recomputing each answer."""
    model = model_of(name)
    language = opened_language(name, random_checkpoint)
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 256, 37).tolist()
    prompts = [[*shared, *rng.integers(0, 256, n).tolist()] for n in (3, 1, 30, 9)]

    def answers(**settings):
        config = EngineConfig(
            backend="reference", dtype="float64", context=96, **settings
        )
        with InferenceEngine(language, byte_tokenizer, config) as engine:
            found = engine.generate(prompts, max_tokens=20)
            again = engine.generate(prompts, max_tokens=20)
            hits, lost = engine.stats.prefix_hit_tokens, engine.stats.preemptions
        assert [one.token_ids for one in again] == [one.token_ids for one in found]
        return [one.token_ids for one in found], hits, lost

    plain, hits, _ = answers(max_batch=1, use_kv_cache=False)
    assert hits == 0
    state = model.state(language.config)
    per_block = sum(
        2 * 16 * 8 * item.kv_heads * item.head_dim * len(item.layers)
        for item in state
        if isinstance(item, Paged)
    )
    cached, hits, _ = answers(max_batch=4, token_budget=16)
    assert cached == plain
    assert hits > len(shared)
    count = 9 if name in RECURRENT else 8
    tight, _, lost = answers(max_batch=4, cache_bytes=count * per_block)
    assert tight == plain
    # With a window in every layer, blocks are freed before the pool runs out.
    assert (lost > 0) == (name != "mistral")


@pytest.mark.parametrize(("size", "hits"), [(None, 64), ("1MiB", 64), ("0", 0)])
def test_samples_of_recurrent_models_share_a_snapshot(
    size, hits, random_checkpoint, byte_tokenizer
):
    language = opened_language("qwen3_next", random_checkpoint)
    config = EngineConfig(backend="reference", context=96, snapshot_host=size)
    prompt = [*range(70)]
    with InferenceEngine(language, byte_tokenizer, config) as engine:
        alone = engine.generate(prompt, max_tokens=8).token_ids
        found = engine.generate(prompt, max_tokens=8, n=3)
        several = [found, *found.alternatives]
        assert {one.token_ids for one in several} == {alone}
        assert engine.stats.prefix_hit_tokens == 3 * hits
        assert (engine.snapshots is not None) == bool(hits)


def opened_language(name, random_checkpoint):
    model = model_of(name)
    files = random_checkpoint(model, name, vocab_size=256)
    return LanguageModel(model, model.config(files.config), files)


def test_every_family_is_registered():
    known = registry().models()
    for architecture, kind, module in FAMILIES:
        assert registry().model(architecture) is model_of(module)
        assert kind in known


@pytest.mark.parametrize("name", NAMES)
def test_mismatched_tensors_are_named(name, random_checkpoint):
    model = model_of(name)
    files = random_checkpoint(model, name)
    tensors = {key: files.tensor(key).data for key in files.names()}
    gone = next(key for key in tensors if "layers.3" in key and "_proj" in key)
    odd = next(
        key for key in tensors if "layers.1" in key and key.endswith("norm.weight")
    )
    del tensors[gone]
    tensors[odd] = tensors[odd][:-1]
    tensors["model.layers.0.surplus.weight"] = tensors[odd]
    backend = ReferenceBackend(DEVICE)
    bad = type(files)(files.config, tensors)
    with pytest.raises(WeightMismatch) as caught:
        local_runner(backend, model, bad, limits_of(model, files))
    message = str(caught.value)
    assert f"missing {gone}" in message
    assert f"{odd} has shape" in message
    assert "unused model.layers.0.surplus.weight" in message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads"])
def test_a_missing_size_is_named(name, field, random_checkpoint):
    files = random_checkpoint(model_of(name), name)
    fields = {key: value for key, value in files.config.items() if key != field}
    with pytest.raises(CheckpointError, match=f"'{field}' is missing"):
        model_of(name).config(fields)


def test_the_docs_list_every_family():
    page = Path(__file__).parents[3] / "docs" / "checkpoints.md"
    rows = re.findall(
        r"^\| `(\w+(?:For\w+|LMHeadModel))` \| (.*?) \| (.*?) \|",
        page.read_text("utf-8"),
        re.M,
    )
    listed = {name: ggufs for name, _, ggufs in rows}
    texts = {
        "Mistral3ForConditionalGeneration", "Qwen3VLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }  # fmt: skip
    assert set(listed) == texts | {architecture for architecture, _, _ in FAMILIES}
    for families in (gguf_names.FAMILIES, gguf_names.MOE_FAMILIES):
        for key, family in families.items():
            assert f"`{key}`" in listed[family.architecture]
