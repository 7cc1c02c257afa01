"""PEFT folders that are damaged, of another model, or need what is not supported."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl.adapters.folder import read_adapter
from inl.errors import CheckpointError, ModelError, WeightMismatch
from lora_files import LoraFiles, modules

SHAPES = {
    "model.layers.0.self_attn.q_proj": (6, 8),
    "model.layers.0.mlp.down_proj": (8, 12),
}
TENSORS = {f"{name}.weight": np.zeros(shape) for name, shape in SHAPES.items()}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    return LoraFiles(TENSORS, seed=1).write(tmp_path / "adapter")


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_matrices_are_read_with_their_scale(folder):
    files = LoraFiles(TENSORS, seed=1)
    adapter = read_adapter(folder, SHAPES, 4)
    assert adapter.modules.keys() == files.pairs.keys() == modules(TENSORS).keys()
    for name, (a, b) in files.pairs.items():
        np.testing.assert_array_equal(adapter.modules[name].a, a)
        np.testing.assert_allclose(adapter.modules[name].b, 1.5 * b, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"use_rslora": True}, 3.0),
        ({"alpha_pattern": {"q_proj": 8}}, 2.0),
        ({"alpha_pattern": {"self_attn.q_proj": 2.0}, "use_rslora": True}, 1.0),
        ({"alpha_pattern": {"proj": 8}}, 1.5),  # no whole part of the name
    ],
)
def test_scales_are_those_of_peft(folder, fields, scale):
    plain = read_adapter(folder, SHAPES, 4)
    change(folder, **fields)
    adapter = read_adapter(folder, SHAPES, 4)
    name = "model.layers.0.self_attn.q_proj"
    ratio = adapter.modules[name].b / plain.modules[name].b
    np.testing.assert_allclose(ratio, scale / 1.5, rtol=1e-5)
    assert (adapter.digest != plain.digest) == (scale != 1.5)


def test_the_digest_is_of_the_contents(folder, tmp_path):
    copy = LoraFiles(TENSORS, seed=1).write(tmp_path / "copy")
    other = LoraFiles(TENSORS, seed=2).write(tmp_path / "other")
    digest = read_adapter(folder, SHAPES, 4).digest
    assert read_adapter(copy, SHAPES, 4).digest == digest
    assert read_adapter(other, SHAPES, 4).digest != digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora: found True (DoRA"),
        ({"use_dora": True}, "; accepted: no such field, null or false; or merge"),
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save: found ['lm_head'] (they replace whole matrices",
        ),
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            "target_parameters: found ['mlp.experts.down_proj'] (adapters of param",
        ),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: found [3] (they"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: found [[0, 2]]; acc"),
        ({"peft_type": "LOHA"}, "accepted: LORA; or merge the adapter into its base"),
        ({"bias": "all"}, "bias: found 'all'; accepted: none"),
        ({"lora_bias": True}, "lora_bias: found True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: found True"),
        ({"peft_type": "IA3"}, "peft_type: found 'IA3'; accepted: LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: found 'pissa'"),
        ({"of_tomorrow": 3}, "of_tomorrow: found 3"),
        ({"r": 0}, "r: found 0; accepted: a number above 0"),
        ({"r": True}, "r: found True"),
        ({"lora_alpha": None}, "lora_alpha: found None"),
        ({"lora_alpha": float("nan")}, "lora_alpha: found nan"),
        ({"use_rslora": 1}, "use_rslora: found 1; accepted: true or false"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern: found"),
        ({"rank_pattern": []}, None),
    ],
)
def test_a_field_that_changes_results_is_refused_by_name(folder, fields, message):
    change(folder, **fields)
    if message is None:
        assert read_adapter(folder, SHAPES, 4)
        return
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, SHAPES, 4)
    assert str(caught.value).startswith(f"{folder / 'adapter_config.json'}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "lora_B.weight': missing"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((4, 9), "f4")}),
            r"found [4, 9]; accepted: [4, 8], for rank 4",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((3, 8), "f4")}),
            r"found [3, 8]; accepted: [4, 8], for rank 4",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.full((4, 8), np.nan, "f4")}),
            "q_proj.lora_A: found NaN or infinity",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((4, 8), "i4")}),
            "found int32 [4, 8]; accepted: matrices",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": np.zeros((2, 2))}),
            "'base_model.model.lm_head.weight': found float64",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.lm_head.lora_A.weight": np.zeros((4, 8), "f4"),
                    "base_model.model.lm_head.lora_B.weight": np.zeros((9, 4), "f4"),
                }
            ),
            "module 'lm_head': found an adapter for it, but only linear layers of "
            "decoder layers have adapters; accepted: down_proj, q_proj",
        ),
        (
            lambda t: t.update(
                {
                    f"{Q}.experts.3.lora_A.weight": np.zeros((4, 8), "f4"),
                    f"{Q}.experts.3.lora_B.weight": np.zeros((9, 4), "f4"),
                }
            ),
            "but adapters of experts are not computed; accepted: down_proj, q_proj",
        ),
        (
            lambda t: t.update({f"{Q}.lora_magnitude_vector": np.zeros(6, "f4")}),
            "lora_magnitude_vector': found float32 [6]; accepted: matrices",
        ),
        (lambda t: t.clear(), "found no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, alter, message):
    tensors = LoraFiles(TENSORS, seed=1).tensors()
    alter(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError) as caught:
        read_adapter(folder, SHAPES, 4)
    assert str(folder) in str(caught.value)
    assert message in str(caught.value)


def test_a_rank_above_the_configured_one_is_refused(folder):
    with pytest.raises(WeightMismatch, match=r"found rank 4; accepted: up to 3 \(Eng"):
        read_adapter(folder, SHAPES, 3)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_truncated_file_is_refused(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=name):
        read_adapter(folder, SHAPES, 4)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        read_adapter(folder, SHAPES, 4)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_adapter(folder / "none", SHAPES, 4)
