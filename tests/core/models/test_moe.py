"""Mixtures of experts as models: configs, layouts of checkpoints, tracing, ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import CheckpointError, WeightMismatch
from inl.executor.tracing import trace
from inl.models import mixtral, qwen2_moe, qwen3_moe
from inl.models.registry import find_model
from inl.spec.limits import Limits
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, local_runner, reference_ranks
from inl.testing.traffic import Traffic, play
from inl.weights.load import stored_specs
from inl.weights.plan import check_tensors, plan_weights

DEVICE = Device("reference:0")
LIMITS = Limits(slots=8, blocks=(80,), block_size=4, max_blocks_per_seq=12, vocab=96)
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3 = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}
QWEN2 = {**QWEN3, "shared_expert_intermediate_size": 20, "norm_topk_prob": False}
MODELS = {
    "mixtral": (mixtral.MODEL, MIXTRAL),
    "qwen2_moe": (qwen2_moe.MODEL, QWEN2),
    "qwen3_moe": (qwen3_moe.MODEL, QWEN3),
}
IDS = [5, 17, 80, 3, 44, 9]


@pytest.fixture(params=sorted(MODELS))
def family(request):
    return MODELS[request.param]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_architectures_are_found_by_config_name(name, tmp_path):
    kind = {"Mixtral": "mixtral", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}
    for hf in (
        {"architectures": [f"{name}ForCausalLM"]},
        {"model_type": kind[name]},
    ):
        assert find_model(hf, tmp_path) is MODELS[kind[name]][0]


def logits_of(model, hf, tensors, dtype="float32"):
    backend = ReferenceBackend(DEVICE, dtype=dtype)
    checkpoint = MemoryCheckpoint(hf, tensors)
    runner = local_runner(backend, model, checkpoint, LIMITS, dtype=dtype)
    return prompt_logits(runner, IDS)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_experts_per_tok", 7, r"found 7, expected at most num_experts, 6"),
        ("num_experts_per_tok", 0, r"found 0, expected an integer of 1 or more"),
        ("num_experts", None, r"'num_experts' is missing"),
        ("mlp_only_layers", "all", r"found 'all', expected a list of layer"),
        ("norm_topk_prob", 1, r"found 1, expected true or false"),
        ("use_sliding_window", True, r"found true, accepted: false"),
        ("decoder_sparse_step", 0, r"found 0, expected an integer of 1"),
    ],
)
def test_a_bad_config_names_its_field(field, value, sentence, random_model):
    hf, _ = random_model(qwen3_moe.MODEL, **QWEN3)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        qwen3_moe.config({**hf, field: value})
    assert field in str(caught.value)


def test_mixtral_may_have_a_window(random_model):
    hf, tensors = random_model(mixtral.MODEL, **MIXTRAL)
    whole = logits_of(mixtral.MODEL, hf, tensors)
    windowed = {**hf, "sliding_window": 3}
    (group,) = mixtral.MODEL.state(mixtral.config(windowed))
    assert group.window == 3
    found = logits_of(mixtral.MODEL, windowed, tensors)
    assert np.abs(found - whole).max() > 0.01 * np.abs(whole).max()


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [1, 3]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1, 2, 4)),
    ],
)
def test_dense_layers(fields, dense):
    assert qwen3_moe.dense_layers(fields, 5) == dense


def layout_of(tensors, how):
    """The tensors as other files have them: experts fused, or merged by kind."""
    found, stacks = {}, {}
    for name, tensor in tensors.items():
        stem, dot, rest = name.partition(".experts.")
        if not dot:
            found[name] = tensor
            continue
        _, kind, _ = rest.split(".")
        stacks.setdefault((stem, kind), []).append(tensor)
    kinds = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for (stem, kind), parts in stacks.items():
        if how == "merged":
            found[f"{stem}.experts.{kind}.weight"] = np.stack(parts)
            continue
        new = stem.replace("block_sparse_moe", "mlp") + ".experts"
        kind = kinds.get(kind, kind)
        if kind == "down_proj":
            found[f"{new}.down_proj"] = np.stack(parts)
        elif kind == "gate_proj":
            found[f"{new}.gate_up_proj"] = np.stack(parts)
        else:
            both = found[f"{new}.gate_up_proj"], np.stack(parts)
            found[f"{new}.gate_up_proj"] = np.concatenate(both, 1)
    if how == "fused":
        for name in [name for name in found if "block_sparse_moe.gate" in name]:
            found[name.replace("block_sparse_moe", "mlp")] = found.pop(name)
    return found


@pytest.mark.parametrize("how", ["fused", "merged"])
def test_every_checkpoint_layout_of_experts_gives_the_same_logits(
    how, family, random_model
):
    model, fields = family
    hf, tensors = random_model(model, **fields)
    expected = logits_of(model, hf, tensors)
    other = layout_of(tensors, how)
    assert len(other) < len(tensors)
    assert np.array_equal(logits_of(model, hf, other), expected)


@pytest.mark.parametrize("how", ["each", "fused", "merged"])
def test_missing_and_misshapen_experts_are_named(how, random_model):
    model = mixtral.MODEL
    hf, tensors = random_model(model, **MIXTRAL)
    other = tensors if how == "each" else layout_of(tensors, how)
    names = sorted(name for name in other if "layers.1." in name and "expert" in name)
    missing, bent = names[0], names[-1]
    del other[missing]
    other[bent] = other[bent][..., :-1]
    other["model.layers.1.block_sparse_moe.experts.9.w1.weight"] = np.ones((2, 2))
    with pytest.raises(WeightMismatch, match="do not fit") as caught:
        logits_of(model, hf, other)
    lines = str(caught.value).split("\n  ")[1:]
    assert len(lines) == 3
    (gone,) = [line for line in lines if line.startswith("missing")]
    assert gone.startswith(f"missing {missing} [")
    (odd,) = [line for line in lines if line.startswith(bent)]
    assert f"has shape {list(other[bent].shape)}, expected" in odd
    assert lines[2] == "unused model.layers.1.block_sparse_moe.experts.9.w1.weight"


def test_nan_in_a_router_raises_with_its_position(random_model):
    hf, tensors = random_model(mixtral.MODEL, **MIXTRAL)
    name = "model.layers.1.block_sparse_moe.gate.weight"
    tensors[name][2, 7] = np.nan
    with pytest.raises(CheckpointError, match=rf"{name}: found nan at \[2, 7\]"):
        logits_of(mixtral.MODEL, hf, tensors)


def traced(model, hf, bucket):
    kernels = tuple(ReferenceBackend(DEVICE).kernels())
    config = model.config(hf)
    groups = plan_weights(model.weights(config), kernels, {})
    tracer = trace(model, config, groups, bucket, LIMITS, KernelSelection(kernels))
    return {
        name: sum(n for (other, _), n in tracer.counts.items() if other == name)
        for name, _ in tracer.counts
    }


def test_the_number_of_ops_does_not_depend_on_experts_or_tokens(family, random_model):
    model, fields = family
    count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    for buckets in ((Bucket(1, 1), Bucket(7, 7)), (Bucket(7, 5), Bucket(64, 6))):
        found = [
            traced(model, random_model(model, **{**fields, count: experts})[0], bucket)
            for experts in (3, 4, 60)
            for bucket in buckets
        ]
        assert all(one == found[0] for one in found)
        assert found[0]["route"] == found[0]["experts"] == 2


class Watched:
    """A model that records the logits of every step, by thread."""

    def __init__(self, model):
        self.seen = {}
        self.model = dataclasses.replace(model, head=self._head)
        self._inner = model.head

    def _head(self, *args):
        logits = self._inner(*args)
        if isinstance(logits, np.ndarray):
            self.seen.setdefault(id(args[2]), []).append(logits.copy())
        return logits


@pytest.mark.parametrize("how", ["each", "fused", "merged"])
def test_two_ranks_equal_one(how, family, random_model):
    model, fields = family
    hf, tensors = random_model(model, 4, **fields)
    files = MemoryCheckpoint(hf, tensors if how == "each" else layout_of(tensors, how))

    def frames():
        return Traffic(np.random.default_rng(6), LIMITS).frames(15)

    one, two = Watched(model), Watched(model)
    backend = ReferenceBackend(DEVICE, dtype="float64")
    alone = local_runner(backend, one.model, files, LIMITS, dtype="float64")
    expected = play(alone, frames())
    group = reference_ranks(DEVICE, two.model, files, LIMITS, ranks=2, dtype="float64")
    found = play(group, frames())
    group.close()
    assert found == expected
    (wanted,) = one.seen.values()
    assert len(two.seen) == 2
    steps = [sent for sent in frames() if sent.takes is not None]
    for logits in two.seen.values():
        for sent, got, want in zip(steps, logits, wanted, strict=True):
            rows = len(sent.takes)
            size = np.abs(want[:rows]).max()
            assert np.abs(got - want)[:rows].max() < 1e-12 * size


def test_three_ranks_raise_and_name_an_expert(random_model):
    hf, tensors = random_model(
        qwen3_moe.MODEL, **QWEN3 | {"moe_intermediate_size": 10},
        num_attention_heads=6, num_key_value_heads=3, vocab_size=96,
    )  # fmt: skip
    with pytest.raises(
        WeightMismatch,
        match=r"experts\.\{\}\.gate_proj\.weight: axis 1: found 10 .* multiple of 3",
    ):
        reference_ranks(
            DEVICE, qwen3_moe.MODEL, MemoryCheckpoint(hf, tensors), LIMITS, ranks=3
        ).close()


def test_the_shared_expert_affects_the_logits(random_model):
    hf, tensors = random_model(qwen2_moe.MODEL, **QWEN2)
    whole = logits_of(qwen2_moe.MODEL, hf, tensors)
    for part in ("shared_expert.down_proj", "shared_expert_gate"):
        changed = {name: 0.5 * x if part in name else x for name, x in tensors.items()}
        error = np.abs(logits_of(qwen2_moe.MODEL, hf, changed) - whole).max()
        assert error > 1e-3 * np.abs(whole).max(), part


def test_an_empty_checkpoint_reports_the_first_layout():
    config = mixtral.config(
        {
            **MIXTRAL, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        }
    )  # fmt: skip
    stored = stored_specs(MemoryCheckpoint({}, {}))
    groups = plan_weights(mixtral.weights(config), (), stored)
    with pytest.raises(
        WeightMismatch, match=r"missing model\.layers\.0\.block_sparse_moe\.gate\."
    ):
        check_tensors(groups, stored, "nowhere")
