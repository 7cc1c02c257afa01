"""Quantized models as the packages of each format write them, where one is installed.

What they decode is compared; the arithmetic of each format is in ``quantized_models``.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

families = importlib.import_module("families")
models = importlib.import_module("quantized_models")


def linear(weight):
    made = torch.nn.Linear(*reversed(weight.shape), bias=False)
    made.weight.data = weight
    return made


def compressed_tensors(preset, name):
    base = pytest.importorskip(f"compressed_tensors.compressors.{name}.base")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    helpers = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
    unpack, forward = helpers.unpack_fp4_from_uint8, schemes.lifecycle.forward
    decode = forward.dequantize
    scheme = schemes.preset_name_to_scheme(preset, ["Linear"])
    compressor = next(
        each for each in vars(base).values()
        if getattr(each, "__module__", "") == base.__name__
    )  # fmt: skip

    def store(weight):
        state = {"weight": weight}
        width = scheme.weights.group_size
        most = weight.reshape(len(weight), -1, width).abs().amax(-1)
        if preset.startswith("NV"):
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            most = (most * state["weight_global_scale"]).clamp(max=448 * 6)
            state["weight_scale"] = (most / 6).to(torch.float8_e4m3fn).float()
        else:
            top = 6 if scheme.weights.num_bits == 4 else 448
            state["weight_scale"] = 2 ** (most / top).log2().ceil()
        stored = compressor.compress(state, scheme)
        if "weight_packed" not in stored:
            return compressor.decompress(stored, scheme)["weight"].float(), stored
        # The package's own decompress rounds to bfloat16 in between.
        values = unpack(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        scale = compressor._decompress_scale(stored["weight_scale"], torch.float32)
        factor = stored.get("weight_global_scale")
        values = decode(values, scale, args=scheme.weights, global_scale=factor)
        return values, stored

    formats = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
    form = formats.get(name, "mxfp8-quantized")
    return store, models.COMPRESSED | {"format": form}


def modelopt(kind):
    tensors = pytest.importorskip("modelopt.torch.quantization.qtensor")

    def nvfp4(weight):
        made, scale, factor = tensors.NVFP4QTensor.quantize(weight, 16)
        values = made.dequantize(
            dtype=torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16}
        )
        codes = {"weight": made._quantized_data, "weight_scale": scale}
        return values, codes | {"weight_scale_2": factor}

    def mxfp8(weight):
        made, scale = tensors.MXFP8QTensor.quantize(weight)[:2]
        values = made.dequantize(dtype=torch.float32, scale=scale)
        return values, {"weight": made._quantized_data, "weight_scale": scale}

    store = nvfp4 if kind == "NVFP4" else mxfp8
    return store, {"quant_method": "modelopt", "quant_algo": kind}


def auto_round(module, packing, bits, symmetric):
    linears = pytest.importorskip(f"auto_round_extension.torch.{module}")

    def store(weight):
        rows, size = weight.shape
        _, scale, zero, values = models.grouped(weight, bits, 64, symmetric)
        zero = zero.clamp(min=1)  # what the packing stores minus 1
        codes = (weight / scale.repeat_interleave(64, 1)).round()
        codes = codes + zero.repeat_interleave(64, 1)
        codes = codes.clamp(0, 2**bits - 1)
        values = (codes - zero.repeat_interleave(64, 1)) * scale.repeat_interleave(
            64, 1
        ).float()
        made = linears.QuantLinear(bits, 64, size, rows, bias=False)
        made.device = "cpu"
        made.pack(linear(values.float()), scale.float(), zero.float(), None, "cpu")
        return values, {
            name: each for name, each in made.state_dict().items() if name != "g_idx"
        }

    return store, {
        "quant_method": "auto-round", "packing_format": packing, "bits": bits,
        "group_size": 64, "sym": symmetric,
    }  # fmt: skip


def quark(dtype):
    pack = pytest.importorskip("quark.torch.utils.pack")

    def store(weight):
        bits, group = int(dtype[-1]), "per_group"
        shift = 0 if dtype[0] == "u" else 2 ** (bits - 1)
        codes, scale, zero, values = models.grouped(weight, bits, 64, shift != 0)
        method = pack.create_pack_method(group, dtype)
        return values, {
            "weight": method.pack((codes - shift).to(torch.int32), True),
            "weight_scale": scale.T.contiguous(),
            "weight_zero_point": method.pack((zero - shift).to(torch.int32), True),
        }

    return store, {
        "quant_method": "quark", "export": {"pack_method": "reorder"},
        "global_quant_config": {"weight": {"dtype": dtype, "group_size": 64}},
    }  # fmt: skip


def hqq(bits, width, axis):
    core = pytest.importorskip("hqq.core.quantize")

    def store(weight):
        config = core.BaseQuantizeConfig(nbits=bits, group_size=width, axis=axis)
        made = core.HQQLinear(
            linear(weight), config, compute_dtype=torch.float32, device="cpu"
        )
        kept = made.state_dict()
        return made.dequantize().float(), kept

    return store, {"quant_method": "hqq"}


CASES = {
    "compressed-nvfp4": (compressed_tensors, "NVFP4A16", "nvfp4"),
    "compressed-mxfp4": (compressed_tensors, "MXFP4A16", "mxfp4"),
    "compressed-mxfp8": (compressed_tensors, "MXFP8A16", "mxfp8"),
    "modelopt-nvfp4": (modelopt, "NVFP4"),
    "modelopt-mxfp8": (modelopt, "MXFP8"),
    "auto-round": (auto_round, "qlinear_torch_zp", "auto_round:auto_gptq", 4, True),
    "auto-round-zeros": (
        auto_round, "qlinear_torch_zp", "auto_round:auto_gptq", 4, False
    ),
    "auto-round-3": (auto_round, "qlinear_torch", "auto_round", 3, False),
    "auto-round-8": (auto_round, "qlinear_torch", "auto_round:gptqmodel", 8, True),
    "quark-int4": (quark, "int4"),
    "quark-uint4": (quark, "uint4"),
    "quark-int8": (quark, "int8"),
    "hqq-4": (hqq, 4, 64, 1),
    "hqq-3": (hqq, 3, 64, 1),
    "hqq-2-columns": (hqq, 2, 16, 0),
    "hqq-8": (hqq, 8, 128, 1),
    "hqq-1": (hqq, 1, 32, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_what_the_package_decodes(case, tmp_path):
    make, *options = CASES[case]
    folders = models.saved(case, tmp_path, {case: (make(*options), "")})
    ids = np.random.default_rng(0).integers(3, models.VOCAB, 20).tolist()
    found, expected = (
        families.logits(
            families.load(open_model(folder), families.reference(), "float64"), ids
        )
        for folder in folders
    )
    assert families.distance(found, expected) < 1e-5
