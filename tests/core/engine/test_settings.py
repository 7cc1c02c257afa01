"""Every field of EngineConfig, and every generation option, changes something.

``FIELDS`` and ``OPTIONS`` have two values of each: a number of the engine or of its
output differs, or the second value is refused by name. The others are toggled in the
files that ``ELSEWHERE`` names, since they need processes, devices or files.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from byte_tokens import bytes_as_tokens
from inl import EngineConfig
from inl.engine.options import GenerationOptions
from inl.errors import InlError

pytestmark = pytest.mark.full
TESTS = Path(__file__).parents[2]
LETTER = bytes_as_tokens().decode([65])
TEXT = "ab ab ab ab ab ab"
FIELDS = {
    "backend": ("reference", "abacus"),
    "use_kv_cache": (True, False),
    "prefix_cache": (True, False),
    "max_batch": (4, 1),
    "token_budget": (None, 8),
    "context": (96, 32),
    "cache_bytes": (None, 1000),
    "depth": (1, 2),
    "sampling": ("sample_filtered", "greedy"),
    "max_queued_requests": (1024, 1),
    "max_queued_tokens": (1 << 20, 20),
    "max_stop_strings": (64, 1),
    "max_stop_length": (1024, 2),
    "max_logit_bias": (1024, 1),
    "max_samples": (128, 1),
    "speculation": (None, "ngram"),
    "max_drafts": (15, 1),
    "max_adapters": (None, 2),
    "dtype": ("float32", "float7"),
    "kv_dtype": ("auto", "int9"),
    "quantize": (None, "int9"),
    "velocity": (None, "fast"),
    "placement": (None, "rows=2"),
    "tensor_parallel": (1, 3),
    "mesh": (None, "rows=2"),
    "invariant": (False, 1),
    "on_worker_loss": ("raise", "ignore"),
}  # fmt: skip
ELSEWHERE = {
    "placement": "plugins/cpu/test_ranks.py",
    "tensor_parallel": "torch/test_collectives.py",
    "mesh": "plugins/tpu/test_tpu_mesh.py",
    "kv_dtype": "plugins/cpu/test_kv_dtype.py",
    "quantize": "core/weights/test_quantize_select.py",
    "invariant": "plugins/cpu/test_invariant.py",
    "generation_config": "core/engine/test_sampling_defaults.py",
    "weight_copies": "core/executor/test_load_plan.py",
    "velocity": "integration/test_inl_carry.py",
    "expert_load_interval": "core/engine/test_expert_loads.py",
    "expert_copies": "core/placement/test_expert_copies.py",
    "check_weights": "core/engine/test_non_finite_logits.py",
    "max_grammar_bytes": "core/guidance/test_grammars.py",
    "draft_model": "core/speculation/test_speculation.py",
    "draft_backend": "core/speculation/test_speculation.py",
    "adaptive_drafts": "core/speculation/test_speculation.py",
    "adapters": "core/adapters/test_registry.py",
    "max_adapter_rank": "core/adapters/test_registry.py",
    "decode_steps": "core/scheduling/test_repeats.py",
    "inter_token_ms": "core/scheduling/test_mixed_steps.py",
    "warm_up": "torch/test_warm_up.py",
    "allow_hosted": "core/spec/test_selection.py",
    "on_worker_loss": "core/runners/test_worker_runner.py",
    "restart_device": "integration/test_worker_environment.py",
    "worker_seconds": "core/runners/test_restart.py",
    "trace": "core/recording/test_drafts.py",
    "kv_host": "core/engine/test_tier_options.py",
    "kv_disk": "core/engine/test_tier_options.py",
    "snapshot_host": "core/models/test_families.py",
    "role": "core/engine/test_remote_prefill.py",
    "kv_peer": "core/engine/test_remote_prefill.py",
    "kv_store": "core/engine/test_shared_blocks.py",
    "kv_transport": "core/engine/test_transport.py",
    "mmproj": "core/checkpoints/test_projector.py",
    "vision_backend": "integration/test_images.py",
}  # fmt: skip
"""Field -> a test file that has it, for those not in FIELDS or only refused there."""
OPTIONS = {
    "max_tokens": (6, 2),
    "temperature": (0.0, 2.0),
    "top_k": (0, 1),
    "top_p": (1.0, 1e-6),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logit_bias": (None, {65: 1e9}),
    "allowed_token_ids": (None, [66]),
    "logprobs": (None, 2),
    "seed": (1, 2),
    "stop": (None, LETTER),
    "stop_ids": ((), (65,)),
    "ignore_eos": (False, True),
    "min_tokens": (0, 5),
    "bad_words": ((), (LETTER,)),
    "cache_salt": (None, "pepper"),
    "adapter": (None, "absent"),
    "structured": (None, {"choice": 3}),
    "n": (1, 2),
    "prompt_logprobs": (None, 1),
    "prompt_logprobs_start": (0, 2),
    "key": ("", 3),
    "priority": (0, 101),
    "deadline": (None, 1.0),
    "skip_special_tokens": (True, 3),
    "images": (None, [b"no image"]),
}
HOT = {"temperature": 3.0, "seed": 5}
A_ONLY = {"logit_bias": {65: 1e9}}
WITH = {
    "top_k": HOT, "top_p": HOT, "min_p": HOT, "seed": {"temperature": 3.0},
    "stop": A_ONLY, "stop_ids": A_ONLY, "bad_words": A_ONLY,
    "ignore_eos": {"logit_bias": {7: 1e9}},
    "min_tokens": {"logit_bias": {7: 1e9}},
    "presence_penalty": {"repetition_penalty": 1.0},
    "prompt_logprobs_start": {"prompt_logprobs": 0},
}  # fmt: skip
"""Further options that an option needs to have an effect; 7 is the end token."""


def field_outcome(engines, config):
    """What an engine does with some requests, in numbers; or its refusal."""
    try:
        engine = engines(eos=(7,), **config)
        done = [engine.generate(TEXT, max_tokens=3)]
        done += engine.generate([TEXT, "other words than these"], max_tokens=2)
        done += [engine.generate(
            TEXT, max_tokens=1, stop=["xyz", "uvw"], temperature=0.5, seed=1, n=2,
            logit_bias={1: 0.5, 2: 0.5},
        )]  # fmt: skip
    except InlError as error:
        return f"{type(error).__name__}: {error}"
    limits, stats = engine.runner.limits, engine.stats[:5]
    sizes = limits.blocks, limits.depth, limits.adapters, limits.max_drafts
    return [stats, sizes, engine.context, [each.token_ids for each in done]]


def option_outcome(engine, options):
    """One completion, and the tokens that were computed for it; or the refusal."""
    before = engine.stats
    try:
        done = engine.generate(TEXT, **{"max_tokens": 6, **options})
    except InlError as error:
        return f"{type(error).__name__}: {error}"
    texts = done.token_ids, done.text, done.finish_reason, len(done.alternatives)
    return [*texts, done.logprobs, done.prompt_logprobs, engine.stats[1] - before[1]]


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_an_effect(engines, name):
    base = {"speculation": "ngram"} if name == "max_drafts" else {}
    if name in ("max_drafts", "speculation"):
        base["adaptive_drafts"] = False
    first, second = (
        field_outcome(engines, {**base, name: value}) for value in FIELDS[name]
    )
    assert not isinstance(first, str), first
    assert first != second
    if isinstance(second, str):
        refused = str(FIELDS[name][1])
        assert name in second or refused in second, second


def test_every_option_has_an_effect(engines):
    engine = engines(eos=(7,))
    engine.generate(TEXT, max_tokens=1)  # fills the prefix cache
    for name, values in OPTIONS.items():
        also = WITH.get(name, {})
        again, first, second = (
            option_outcome(engine, {**also, name: value})
            for value in (values[0], *values)
        )
        assert not isinstance(first, str), first
        assert first == again, f"{name}: differs by itself"
        assert first != second, name
        if isinstance(second, str):
            assert name in second, second


def test_every_field_and_option_is_listed():
    names = {field.name for field in fields(EngineConfig)}
    assert names == {*FIELDS, *ELSEWHERE}
    assert {*GenerationOptions.__annotations__} == {*OPTIONS}
    for name, file in ELSEWHERE.items():
        assert f"{name}" in (TESTS / file).read_text("utf-8"), (name, file)


def test_a_field_outcome_does_not_differ_by_itself(engines):
    assert field_outcome(engines, {}) == field_outcome(engines, {})
