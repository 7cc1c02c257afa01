"""A cache in fp8 that a checkpoint asks for: its scales, and refusals of others.

The expected logits are those of transformers in float64, with keys and values rounded
by torch between their rotation and the attention.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest

from inl.backend.base import Traits
from inl.device import Device
from inl.errors import CheckpointError
from inl.executor.cache_dtype import cache_dtype, caching_in
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

families = importlib.import_module("families")
models = importlib.import_module("quantized_models")

SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None,
    "strategy": "tensor", "dynamic": False,
}  # fmt: skip
CONFIG = {
    "config_groups": {}, "quant_method": "compressed-tensors",
    "kv_cache_scheme": SCHEME, "format": "dense", "ignore": [],
    "quantization_status": "frozen", "global_compression_ratio": None,
}  # fmt: skip
"""As compressed-tensors 0.20 writes it for a model of which only the cache is fp8."""

K_SCALE, V_SCALE = 0.0173, 0.0081
STEM = "model.layers.0.self_attn"
SCALES = {f"{STEM}.k_scale": [K_SCALE], f"{STEM}.v_scale": [V_SCALE]}
IDS = [3, 60, 7, 7, 21, 90, 4, 4, 33, 80, 81, 82, 5, 5, 17, 44]


def save(folder, scales, config=CONFIG, tensors=None):
    """A small Llama whose checkpoint has ``scales`` and a quantization config."""
    _, plain = models.saved("compressed-fp8-rows", folder)
    stored = safetensors.load_file(plain / "model.safetensors")
    stored |= {name: torch.tensor(value) for name, value in scales.items()}
    stored |= tensors or {}
    safetensors.save_file(stored, plain / "model.safetensors")
    fields = json.loads((plain / "config.json").read_text())
    fields["quantization_config"] = config
    (plain / "config.json").write_text(json.dumps(fields))
    return plain


class RoundedCache(transformers.DynamicCache):
    """Keys and values as a cache in fp8 returns them."""

    def update(self, keys, values, *args, **kwargs):
        rounded = (
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
            for x, scale in (
                (keys, torch.tensor(K_SCALE).to(keys)),
                (values, torch.tensor(V_SCALE).to(values)),
            )
        )
        return super().update(*rounded, *args, **kwargs)


def expected(folder, cache):
    config = models.CONFIG | {"architectures": ["LlamaForCausalLM"]}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{k: v for k, v in config.items() if k != "model_type"}
        )
    ).double()
    stored = safetensors.load_file(folder / "model.safetensors")
    weights = {name: x.double() for name, x in stored.items() if "_scale" not in name}
    model.load_state_dict(weights)
    with torch.inference_mode():
        return model(torch.tensor([IDS]), past_key_values=cache).logits[0].numpy()


def found(folder, backend, dtype="float64", wanted="auto"):
    language = open_model(folder)
    chosen = cache_dtype(backend, wanted, language.checkpoint)
    model = caching_in(language.model, chosen, language.checkpoint)
    runner = families.load(replace(language, model=model), backend, dtype)
    return families.logits(runner, IDS, cuts=(5, 6, 11))


def backends():
    from inl_cpu.backend import open_cpu
    from inl_cpu.torch_backend import TorchCpuBackend

    place = Device("cpu:0")
    return {"native": open_cpu(place), "torch": TorchCpuBackend(place)}


def test_logits_are_those_of_transformers_with_rounded_keys(tmp_path):
    folder = save(tmp_path, SCALES)
    exact = expected(folder, RoundedCache())
    logits = found(folder, families.reference())
    assert families.distance(logits, exact) < 1e-6
    unrounded = expected(folder, transformers.DynamicCache())
    assert families.distance(unrounded, exact) > 1e-3
    for name, backend in backends().items():
        logits = found(folder, backend, "float32")
        assert families.distance(logits, exact) < 1e-5, name
        # Other scales round other numbers.
        ones = save_again(tmp_path / name, {})
        assert families.distance(found(ones, backend, "float32"), exact) > 1e-3, name


def save_again(folder, scales):
    folder.mkdir()
    return save(folder, scales)


OLDER = {
    "projections": {
        f"{STEM}.k_proj.k_scale": K_SCALE, f"{STEM}.v_proj.v_scale": V_SCALE,
    },
    "outputs": {
        f"{STEM}.k_proj.output_scale": [K_SCALE],
        f"{STEM}.v_proj.output_scale": [V_SCALE],
    },
}  # fmt: skip


@pytest.mark.parametrize("names", OLDER)
def test_other_names_of_the_same_scales(names, tmp_path):
    scheme = open_model(save(tmp_path, OLDER[names])).checkpoint.cache_scheme
    assert scheme.scales[0] == pytest.approx((K_SCALE, V_SCALE))


def test_one_scale_of_keys_and_values(tmp_path):
    scheme = open_model(
        save(tmp_path, {f"{STEM}.kv_scale": 0.5})
    ).checkpoint.cache_scheme
    assert scheme.scales == {0: (0.5, 0.5)}


@pytest.mark.parametrize(
    ("scales", "parts"),
    [
        ({f"{STEM}.k_scale": [1.0]}, ["layer 0", "k_scale without v_scale"]),
        (SCALES | {f"{STEM}.k_scale": [[[1.0]], [[2.0]]]}, ["k_scale'", "[2, 1, 1]"]),
        (SCALES | {f"{STEM}.v_scale": [-1.0]}, ["v_scale'", "found -1", "above 0"]),
        (SCALES | {f"{STEM}.v_scale": [float("nan")]}, ["v_scale'", "found nan"]),
        (SCALES | {f"{STEM}.k_scale": [1]}, ["k_scale'", "int64[1]", "float32"]),
        (SCALES | {f"{STEM}.kv_scale": 0.5}, ["another tensor of layer 0"]),
    ],
)
def test_wrong_scales_are_refused_by_name(scales, parts, tmp_path):
    with pytest.raises(CheckpointError) as error:
        open_model(save(tmp_path, scales))
    for part in (str(tmp_path), *parts):
        assert part in str(error.value)


def test_a_layer_without_scales_is_refused_by_name(tmp_path):
    other = {name.replace(".0.", ".7."): value for name, value in SCALES.items()}
    with pytest.raises(CheckpointError, match="of 1 layers, none of layer 0"):
        found(save(tmp_path, other), families.reference())


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, "found type 'int', accepted"),
        ({"kv_cache_scheme": SCHEME | {"num_bits": 4}}, "found num_bits 4"),
        ({"kv_cache_scheme": SCHEME | {"symmetric": False}}, "found symmetric"),
        ({"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, "found strategy"),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": "NVFP4"}, "found 'NVFP4'"),
    ],
)
def test_other_schemes_are_ignored_by_name(config, part, tmp_path, caplog):
    language = open_model(save(tmp_path, SCALES, CONFIG | config))
    backend = families.reference()
    chosen = cache_dtype(backend, "auto", language.checkpoint)
    assert chosen.dtype is None
    assert chosen.is_warning
    assert part in chosen.note
    assert caching_in(language.model, chosen, language.checkpoint) is language.model
    assert part in caplog.text


def test_who_decides_the_dtype(tmp_path):
    asked = open_model(save(tmp_path, SCALES)).checkpoint
    algorithm = CONFIG | {"kv_cache_scheme": None, "kv_cache_quant_algo": "FP8"}
    named = open_model(save_with(tmp_path / "b", algorithm)).checkpoint
    silent = CONFIG | {"kv_cache_scheme": None}
    calibrated = open_model(save_with(tmp_path / "c", silent)).checkpoint
    backend = families.reference()
    for checkpoint in (asked, named):
        chosen = cache_dtype(backend, "auto", checkpoint)
        assert chosen.dtype == "float8_e4m3"
        assert "scales of 1 layers are those of the checkpoint" in chosen.note
    assert cache_dtype(backend, "auto", calibrated).dtype is None
    chosen = cache_dtype(backend, "fp8", calibrated)
    assert chosen.dtype == "float8_e4m3"
    assert "those of the checkpoint" in chosen.note


def save_with(folder, config):
    folder.mkdir()
    return save(folder, SCALES, config)


def test_a_device_without_fp8_says_so(tmp_path):
    checkpoint = open_model(save(tmp_path, SCALES)).checkpoint

    class Plain:
        device, traits = Device("npu:0"), Traits()

    chosen = cache_dtype(Plain(), "auto", checkpoint)
    assert chosen.dtype is None
    assert chosen.is_warning
    assert "asks for fp8, which npu:0 does not cache in" in chosen.note


def test_weights_and_cache_of_modelopt(tmp_path):
    """FP8 weights with a scale per tensor; k_scale beside the projection."""
    config = {
        "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }  # fmt: skip
    small, _ = models.saved("fp8-tensor", tmp_path)
    stored = safetensors.load_file(small / "model.safetensors")
    for name, value in OLDER["projections"].items():
        stored[name] = torch.tensor(value)
    safetensors.save_file(stored, small / "model.safetensors")
    fields = json.loads((small / "config.json").read_text())
    plain = found(small, families.reference())
    (small / "config.json").write_text(
        json.dumps(fields | {"quantization_config": config})
    )
    language = open_model(small)
    assert "modelopt" in language.checkpoint.notes[0]
    assert cache_dtype(families.reference(), "auto", language.checkpoint).dtype
    exact = found(small, families.reference(), wanted="fp8")
    assert (found(small, families.reference()) == exact).all()
    assert 1e-3 < families.distance(plain, exact) < 0.3
