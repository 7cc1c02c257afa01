"""Matrices in small floats, element by element: NVFP4, MXFP4, MXFP8, FBGEMM's FP8."""

from __future__ import annotations

import torch

from quantized_models import COMPRESSED, fp8

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MODELOPT = {"quant_method": "modelopt"}


def e2m1(values):
    """The nearest codes of 4 bits (sign, 2 exponent bits, 1 mantissa bit), and pairs
    of them in bytes, the first in the low half."""
    near = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (near + 8 * (values < 0)).to(torch.uint8)
    return torch.where(values < 0, -E2M1[near], E2M1[near]), (
        codes[..., 0::2] | codes[..., 1::2] << 4
    )


def nvfp4(tool):
    """Scales of 16 columns in E4M3, of the whole matrix in float32."""

    def store(weight):
        groups = weight.reshape(len(weight), -1, 16)
        whole = weight.abs().max() / (448 * 6)
        scale = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        each = (scale.float() * whole)[..., None]
        values, packed = e2m1(torch.nan_to_num(groups / each))
        values = (values * each).reshape(weight.shape)
        packed = packed.reshape(len(weight), -1)
        if tool == "modelopt":
            return values, {
                "weight": packed, "weight_scale": scale, "weight_scale_2": whole,
                "input_scale": torch.tensor(0.5),
            }  # fmt: skip
        if tool == "modelopt-awq":
            factors = torch.linspace(0.5, 2, weight.shape[1])
            return values * factors, {
                "weight": packed, "weight_scale": scale, "weight_scale_2": whole,
                "pre_quant_scale": factors,
            }  # fmt: skip
        return values, {
            "weight_packed": packed, "weight_scale": scale,
            "weight_global_scale": (1 / whole).reshape(1),
            "input_global_scale": torch.ones(1),
        }  # fmt: skip

    if tool == "compressed":
        return store, COMPRESSED | {"format": "nvfp4-pack-quantized"}
    algorithm = "NVFP4_AWQ" if tool == "modelopt-awq" else "NVFP4"
    return store, MODELOPT | {"quant_algo": algorithm}


def powers(weight, largest):
    """Exponents of 32 columns, with a bias of 127, and what they stand for."""
    most = weight.reshape(len(weight), -1, 32).abs().amax(-1)
    power = (most / largest).log2().ceil()
    return (power + 127).to(torch.uint8), torch.repeat_interleave(2**power, 32, 1)


def mxfp4(config, packed_as="weight_packed"):
    def store(weight):
        scale, each = powers(weight, 6)
        values, packed = e2m1(weight / each)
        return values * each, {packed_as: packed, "weight_scale": scale}

    return store, config


def mxfp8(config, scale_as="weight_scale", dtype=torch.uint8):
    def store(weight):
        scale, each = powers(weight, 448)
        codes = (weight / each).to(torch.float8_e4m3fn)
        return codes.float() * each, {"weight": codes, scale_as: scale.view(dtype)}

    return store, config


def rows_of_float32(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    return scale, scale


MIXED = {"config_groups": {"a": {"format": "nvfp4-pack-quantized"}}}
FORMATS = {
    "compressed-nvfp4": (nvfp4("compressed"), "nvfp4-pack-quantized: 7 matrices dec"),
    "modelopt-nvfp4": (nvfp4("modelopt"), "modelopt, NVFP4: 7 matrices decoded"),
    "modelopt-nvfp4-awq": (nvfp4("modelopt-awq"), "7 matrices decoded"),
    "compressed-mxfp4": (
        mxfp4(COMPRESSED | {"format": "mxfp4-pack-quantized"}), "repacked as mxfp4"
    ),
    "compressed-mxfp8": (
        mxfp8(COMPRESSED | {"format": "mxfp8-quantized"}), "repacked as mxfp8"
    ),
    "modelopt-mxfp8": (
        mxfp8(MODELOPT | {"quant_algo": "MXFP8"}), "MXFP8: 7 matrices repacked"
    ),
    "mxfp8": (
        mxfp8({"quant_method": "mxfp8"}, "weight_scale_inv"), "repacked as mxfp8"
    ),
    "fp8-mxfp8": (
        mxfp8(
            {"quant_method": "fp8", "weight_block_size": [1, 32]},
            "weight_scale_inv", torch.float8_e8m0fnu,
        ), "repacked as mxfp8",
    ),
    "modelopt-fp8": (
        fp8("modelopt", lambda w: 2 * (w.abs().max() / 448,), quant_algo="FP8"),
        "modelopt, FP8: 7 matrices decoded",
    ),
    "fbgemm": (fp8("fbgemm_fp8", rows_of_float32), "FBGEMM FP8: 7 matrices decoded"),
    "quark-mxfp4": (
        mxfp4({
            "quant_method": "quark", "export": {"pack_method": "reorder"},
            "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
        }, "weight"), "Quark, fp4: 7 matrices repacked as mxfp4",
    ),
}  # fmt: skip
