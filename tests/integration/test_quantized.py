"""Quantized checkpoints: their logits are those of the dequantized weights."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from inl.checkpoints.checkpoint import open_checkpoint
from inl.errors import CheckpointError, WeightMismatch
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
safe_open = pytest.importorskip("safetensors").safe_open

families = importlib.import_module("families")
models = importlib.import_module("quantized_models")
FORMATS = models.FORMATS | {
    name: form
    for module in ("torchao_models", "block_float_models", "tool_models")
    for name, form in importlib.import_module(module).FORMATS.items()
}
saved = partial(models.saved, formats=FORMATS)
BOUND = 1e-3


def ids():
    return np.random.default_rng(0).integers(3, models.VOCAB, 20).tolist()


def logits(folder, backend, dtype="float32"):
    return families.logits(families.load(open_model(folder), backend, dtype), ids())


def native():
    from inl.device import Device
    from inl_cpu.backend import open_cpu

    return open_cpu(Device("cpu:0"))


@pytest.mark.parametrize("form", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(form, tmp_path):
    small, plain = saved(form, tmp_path)
    (note,) = open_model(small).checkpoint.notes
    assert FORMATS[form][1] in note
    expected = logits(plain, families.reference(), "float64")
    found = logits(small, families.reference(), "float64")
    assert families.distance(found, expected) < 1e-5


Q4_1 = (
    "gptq-asymmetric", "gptq-one-group", "gptq-2", "awq", "compressed-int4-zeros",
    "compressed-int4-rows",
    "torchao-intx4-zeros", "torchao-int4", "torchao-int4-tiles", "auto-round-zeros",
    "auto-round-awq", "quark-uint4", "hqq", "hqq-3",
)  # fmt: skip
Q8_0 = "compressed-int8", "compressed-mixed", "bnb-int8", "torchao-int8"


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_dtype_of_16_bits_rounds(form, tmp_path):
    """Blocks change less than bfloat16 does; what no blocks store has 8 bits."""
    small, plain = saved(form, tmp_path)
    language = open_model(small)
    exact = language.checkpoint
    changed = replace(language, checkpoint=exact.rounded("q8_0"))
    (note,) = changed.checkpoint.notes
    expected = logits(plain, families.reference(), "float64")
    runner = families.load(changed, families.reference(), "float64")
    distance = families.distance(families.logits(runner, ids()), expected)
    if form in Q4_1 + Q8_0:
        assert f"repacked as {'q4_1' if form in Q4_1 else 'q8_0'}" in note
        half = logits(in_bfloat16(plain), families.reference(), "float64")
        assert distance < families.distance(half, expected)
    elif "decoded" in exact.notes[0]:
        assert "rounded to q8_0" in note
        assert 1e-5 < distance < 5e-2
    else:
        assert note == exact.notes[0]
        assert distance < 1e-5


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("fp8-tensor", "fp8_128"),
        ("compressed-fp8-dynamic", "fp8_128"),
        ("compressed-fp8-rows", "float32"),  # its activations are not to be rounded
        ("fp8-blocks", "float32"),
        ("nf4", "float32"),
        ("awq", "q4_1"),
    ],
)
def test_float8_stays_for_kernels_that_multiply_it(form, dtype, tmp_path):
    small, plain = saved(form, tmp_path)
    language = open_model(small)
    kept = language.checkpoint.rounded("fp8_128")
    assert kept.spec("model.layers.0.mlp.down_proj.weight")[0] == dtype
    way = "decoded" if dtype == "float32" else f"repacked as {dtype}"
    assert way in kept.notes[0]
    runner = families.load(
        replace(language, checkpoint=kept), families.reference(), "float64"
    )
    expected = logits(plain, families.reference(), "float64")
    bound = 2e-2 if form == "awq" else 1e-5
    assert families.distance(families.logits(runner, ids()), expected) < bound


def in_bfloat16(folder):
    """The folder with its matrices rounded to bfloat16."""
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    halves = {name: each.to(torch.bfloat16) for name, each in tensors.items()}
    safetensors.save_file(halves, path)
    return folder


NATIVE = (
    "gptq", "gptq-act-order", "awq", "fp8-blocks", "nf4", "torchao-int8",
    "torchao-int4-tiles", "modelopt-nvfp4", "compressed-mxfp4", "compressed-mxfp8",
)  # fmt: skip


@pytest.mark.parametrize("form", NATIVE)
def test_the_native_backend_computes_with_them(form, tmp_path):
    small, plain = saved(form, tmp_path)
    expected = logits(plain, families.reference(), "float64")
    found = logits(small, native())
    # Blocks of codes are multiplied with 8-bit activations, as those of GGUF files are.
    bound = BOUND if "decoded" in FORMATS[form][1] or "fp8" in form else 2e-2
    assert families.distance(found, expected) < bound


def damaged(form, path, change=lambda tensors: None, texts=None, **config):
    """The error of a model with changed tensors of one matrix, or another config."""
    small, _ = saved(form, path)
    with safe_open(small / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.load_file(small / "model.safetensors")
    parts = {name: tensors.pop(name) for name in list(tensors) if ".k_proj." in name}
    stem = "model.layers.0.self_attn.k_proj."
    parts = {name.removeprefix(stem): tensor for name, tensor in parts.items()}
    change(parts)
    tensors |= {stem + name: tensor.contiguous() for name, tensor in parts.items()}
    old, new = texts or ("", "")
    owner = f"{stem}weight"
    metadata[owner] = metadata[owner].replace(old, new)
    safetensors.save_file(tensors, small / "model.safetensors", metadata)
    fields = json.loads((small / "config.json").read_text())
    fields["quantization_config"] |= config
    (small / "config.json").write_text(json.dumps(fields))
    with pytest.raises((CheckpointError, WeightMismatch)) as caught:
        logits(small, families.reference(), "float64")
    return str(caught.value)


def cut(name, rows=-1):
    return lambda parts: parts.update({name: parts[name][:rows]})


def filled(name, value):
    return lambda parts: parts.update({name: torch.full_like(parts[name], value)})


def in_floats(name):
    return lambda parts: parts.update({name: parts[name].float()})


DAMAGE = {
    "gptq scales": (
        "gptq",
        cut("scales"),
        {},
        ["k_proj.scales", "GPTQ, 4 bits", "[1, 64]"],
    ),
    "gptq rows": ("gptq", cut("qweight"), {}, ["k_proj.g_idx", "[128]", "[120]"]),
    "gptq without zeros": (
        "gptq",
        lambda parts: parts.pop("qzeros"),
        {},
        ["k_proj", "no 'qzeros' beside it"],
    ),
    "gptq group": (
        "gptq-act-order",
        filled("g_idx", 7),
        {},
        ["g_idx", "groups to 7", "1"],
    ),
    "gptq called symmetric": (
        "gptq-asymmetric",
        None,
        {"sym": True},
        ["q_proj", "q4_0 cannot store"],
    ),
    "gptq of other bits": (
        "gptq",
        None,
        {"bits": 8},
        ["GPTQ, 8 bits", "qzeros", "shape"],
    ),
    "gptq of 5 bits": (
        "gptq",
        None,
        {"bits": 5},
        ["quantization_config.bits", "5", "2, 3, 4, 8"],
    ),
    "gptq called 3 bits": (
        "gptq",
        None,
        {"bits": 3},
        ["GPTQ, 3 bits", "qweight", "32 words", "a multiple of 3"],
    ),
    "gptq dtype": (
        "gptq",
        lambda parts: parts.update(scales=parts["scales"].to(torch.int16)),
        {},
        ["scales", "int16", "float16"],
    ),
    "gptq called awq": (
        "gptq",
        None,
        {"quant_method": "awq"},
        ["AWQ", "qzeros", "shape"],
    ),
    "awq version": ("awq", None, {"version": "gemv"}, ["version", "'gemv'", "gemm"]),
    "fp8 scale": (
        "fp8-blocks",
        cut("weight_scale_inv"),
        {},
        ["FP8", "[1, 3]", "[2, 3]"],
    ),
    "fp8 block": (
        "fp8-blocks",
        None,
        {"weight_block_size": [48]},
        ["weight_block_size", "[48]"],
    ),
    "fp8 not finite": (
        "fp8-blocks",
        filled("weight_scale_inv", float("nan")),
        {},
        ["NaN", "finite"],
    ),
    "packed shape": (
        "compressed-int4",
        filled("weight_shape", 3),
        {},
        ["weight_packed", "[3, 3]"],
    ),
    "other compression": (
        "compressed-int4",
        None,
        {"format": "marlin-24"},
        ["format", "'marlin-24'"],
    ),
    "sparse": (
        "compressed-int4",
        None,
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        ["sparsity_config.format", "'sparse-24-bitmask'", "dense"],
    ),
    "rotated": (
        "compressed-int4",
        None,
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        ["quantization_config.transform_config", "rotations"],
    ),
    "groups that are no object": (
        "compressed-int4",
        None,
        {"config_groups": [1]},
        ["quantization_config.config_groups", "[1]", "an object"],
    ),
    "zero points of floats": (
        "compressed-int8-rows-zeros",
        in_floats("weight_zero_point"),
        {},
        ["weight_zero_point", "float32", "int8"],
    ),
    "nf4 state": (
        "nf4",
        filled("weight.quant_state.bitsandbytes__nf4", 65),
        {},
        ["NF4", "JSON"],
    ),
    "nf4 bytes": ("nf4", cut("weight"), {}, ["NF4", "k_proj.weight'", "[4096, 1]"]),
    "torchao data": (
        "torchao-int8",
        cut("_weight_qdata"),
        {},
        ["_weight_scale", "torchao Int8WeightOnlyConfig, Int8Tensor", "[63, 1]"],
    ),
    "torchao scales": (
        "torchao-int4",
        cut("_weight_scale"),
        {},
        ["_weight_scale", "Int4Tensor", "shape [1, 64]", "[2, 64]"],
    ),
    "torchao tiles": (
        "torchao-int4-tiles",
        cut("_weight_qdata"),
        {},
        ["_weight_qdata", "56 x 1024", "64 x 128"],
    ),
    "torchao zeros": (
        "torchao-int4-tiles",
        lambda parts: parts.pop("_weight_scale_and_zero"),
        {},
        ["_weight_qdata", "no '_weight_scale_and_zero' beside it"],
    ),
    "torchao without metadata": (
        "torchao-intx4",
        None,
        {"texts": ("IntxUnpackedToInt8Tensor", "")},
        ["_weight_qdata", "subclass ''", "Int8Tensor"],
    ),
    "torchao subclass": (
        "torchao-intx4",
        None,
        {"texts": ("IntxUnpackedToInt8Tensor", "NVFP4Tensor")},
        ["k_proj._weight_qdata", "'NVFP4Tensor'", "Float8Tensor"],
    ),
    "torchao damaged text": (
        "torchao-intx4",
        None,
        {"texts": ("block_size", "black_size")},
        ["_weight_qdata", "metadata", "a block_size"],
    ),
    "torchao codes": (
        "torchao-intx4",
        filled("_weight_qdata", 9),
        {},
        ["k_proj.weight", "q4_0 cannot store"],
    ),
    "torchao factor on inputs": (
        "torchao-intx4",
        lambda parts: parts.update(_weight_act_pre_scale=torch.ones(128)),
        {},
        ["_weight_act_pre_scale", "none"],
    ),
    "torchao without a type": (
        "torchao-intx4",
        None,
        {"quant_type": None},
        ["quantization_config.quant_type", "'default'"],
    ),
    "nvfp4 scales": (
        "modelopt-nvfp4",
        cut("weight_scale"),
        {},
        ["weight_scale", "modelopt, NVFP4", "[63, 8]", "[64, 8]"],
    ),
    "nvfp4 factor": (
        "modelopt-nvfp4",
        lambda parts: parts.pop("weight_scale_2"),
        {},
        ["k_proj", "no 'weight_scale_2' beside it"],
    ),
    "nvfp4 divisor": (
        "compressed-nvfp4",
        filled("weight_global_scale", 0),
        {},
        ["weight_global_scale", "found 0"],
    ),
    "modelopt algorithm": (
        "modelopt-nvfp4",
        None,
        {"quant_algo": "W4A8_AWQ"},
        ["quantization_config.quant_algo", "'W4A8_AWQ'", "NVFP4"],
    ),
    "mxfp4 exponents": (
        "compressed-mxfp4",
        filled("weight_scale", 255),
        {},
        ["weight_scale", "exponent 255, NaN"],
    ),
    "mxfp8 not finite": (
        "compressed-mxfp8",
        filled("weight", float("nan")),
        {},
        ["k_proj.weight'", "NaN", "finite"],
    ),
    "auto-round pattern": (
        "auto-round",
        None,
        {"extra_config": {"(a+)+": {"bits": 8}}},
        ["extra_config", "'(a+)+'", "patterns with '.*'"],
    ),
    "auto-round packing": (
        "auto-round",
        None,
        {"packing_format": "auto_round:other"},
        ["packing_format", "'auto_round:other'", "auto_round:auto_awq"],
    ),
    "quark dtype": (
        "quark-int4",
        None,
        {"global_quant_config": {"weight": {"dtype": "int3"}}},
        ["global_quant_config.weight.dtype", "'int3'", "uint4"],
    ),
    "quark scales": (
        "quark-int4",
        cut("weight_scale", 1),
        {},
        ["weight_zero_point", "Quark, int4", "[2, 8]", "[1, 8]"],
    ),
    "hqq bits": ("hqq", filled("nbits", 7), {}, ["k_proj.nbits", "found 7"]),
    "hqq codes": ("hqq", cut("W_q"), {}, ["k_proj.W_q", "[63, 64]", "[64, 64]"]),
    "unknown method": (
        "gptq",
        None,
        {"quant_method": "aqlm"},
        ["quant_method", "'aqlm'", "gptq"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_matrices_are_refused_by_name(case, tmp_path):
    form, change, config, parts = DAMAGE[case]
    message = damaged(form, tmp_path, change or (lambda _: None), **config)
    for part in parts:
        assert part in message, message


def test_modelopts_own_file_describes_what_the_config_does_not(tmp_path):
    small, _ = saved("modelopt-nvfp4", tmp_path)
    fields = json.loads((small / "config.json").read_text())
    del fields["quantization_config"]
    (small / "config.json").write_text(json.dumps(fields))
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": inner})
    (small / "hf_quant_config.json").write_text(text)
    (note,) = open_model(small).checkpoint.notes
    assert note == "modelopt, NVFP4: 7 matrices decoded when they are loaded"
    (small / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null}}'
    )
    assert "quantization_config" not in open_checkpoint(small).config


def test_a_method_that_is_no_object_is_refused(tmp_path):
    small, _ = saved("gptq", tmp_path)
    fields = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(fields | {"quantization_config": 4}))
    with pytest.raises(CheckpointError, match="'quantization_config': found 4"):
        open_model(small)


def test_compressed_tensors_unpacks_the_same_codes():
    """Against the package that writes the format, where it is installed."""
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from inl.checkpoints.quantized.matrix import unpack_words

    codes = torch.randint(-8, 8, (6, 40), dtype=torch.int8)
    for axis in (0, 1):
        stored = pack.pack_to_int32(codes, 4, packed_dim=axis)
        found = unpack_words(stored.numpy(), 4, axis=axis)[:6, :40]
        assert np.array_equal(found.astype(int) - 8, codes.numpy())


def test_explain_says_how_weights_are_loaded(tmp_path, capsys):
    from inl.cli.main import main

    small, _ = saved("gptq-act-order", tmp_path)
    assert main(["explain", "--model", str(small), "--device", "reference"]) == 0
    expected = "weights: GPTQ, 4 bits, groups of 64, act-order: 7 matrices decoded when"
    assert expected in capsys.readouterr().out
