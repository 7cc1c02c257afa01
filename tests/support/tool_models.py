"""Models as AutoRound, Quark and HQQ store them, element by element."""

from __future__ import annotations

import torch

from quantized_models import awq, fp8, gptq, grouped, per_tensor, words

REORDERED = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each code in a word of Quark."""


def auto_round(store, packing, **options):
    """What another tool stores, under the config of AutoRound."""
    store, config = store
    fields = {name: config[name] for name in ("bits", "group_size") if name in config}
    return store, fields | {
        "quant_method": "auto-round", "packing_format": packing, "data_type": "int",
        "sym": config.get("sym", False), **options,
    }  # fmt: skip


def of_two_kinds():
    """The larger matrices with 8 bits, the others with 4."""
    small, large = gptq(bits=4)[0], gptq(bits=8, width=32)[0]

    def store(weight):
        return (large if weight.shape[0] > 128 else small)(weight)

    extra = {
        "model.layers.0.mlp.gate_proj": {"bits": 8, "group_size": 32},
        r".*layers\.0\.mlp\.up_.*": {"bits": 8, "group_size": 32, "sym": True},
        "lm_head": {"bits": 16},
    }
    return store, gptq(bits=4)[1] | {"extra_config": extra}


def quark(dtype, width=0, pack_method="reorder", symmetric=True):
    bits = int(dtype[-1])
    shift = 0 if dtype[0] == "u" else 2 ** (bits - 1)

    def pack(codes):
        codes = (codes - shift).to(torch.int64)
        if bits == 8:
            return codes.to(torch.uint8 if dtype[0] == "u" else torch.int8)
        order = REORDERED if pack_method == "reorder" else None
        return words(codes % 16, 4, order)

    def store(weight):
        size = width or weight.shape[1]
        codes, scale, zero, values = grouped(weight, bits, size, symmetric)
        if width:
            codes, scale, zero = codes.T, scale.T, zero.T
        else:
            scale, zero = scale[:, 0], zero[:, 0]
        tensors = {
            "weight": pack(codes.contiguous()),
            "weight_scale": scale.contiguous(),
        }
        tensors["weight_zero_point"] = pack(zero.contiguous())
        return values, tensors

    scheme = {"dtype": dtype, "group_size": width, "symmetric": symmetric}
    return store, {
        "quant_method": "quark",
        "export": {"pack_method": pack_method, "weight_format": "real_quantized"},
        "global_quant_config": {"weight": scheme},
    }


def hqq(bits, width, axis, as_floats=False):
    """Groups of ``width`` numbers: rows of an array with ``axis`` 1, or columns."""

    def store(weight):
        shape = (-1, width) if axis else (width, -1)
        groups = weight.reshape(shape)
        low, high = groups.amin(axis, True), groups.amax(axis, True)
        scale = ((high - low) / (2**bits - 1)).to(torch.float16)
        zero = (-low / scale).to(torch.float16)
        codes = (groups / scale + zero).round().clamp(0, 2**bits - 1)
        values = (codes - zero.float()) * scale.float()
        count = 10 if bits == 3 else 8 // bits
        lines = -(-len(codes) // count)
        padded = torch.zeros(lines * count, codes.shape[1], dtype=torch.int64)
        padded[: len(codes)] = codes
        parts = padded.reshape(count, lines, -1)
        stored = sum(part << bits * (count - 1 - at) for at, part in enumerate(parts))
        stored = stored.to(torch.int32 if bits == 3 else torch.uint8)
        numbers = {"nbits": bits, "group_size": width, "axis": axis}
        return values.reshape(weight.shape), {
            "W_q": stored.view(torch.float16) if as_floats else stored,
            "scale": scale, "zero": zero, "shape": torch.tensor(weight.shape),
            **{name: torch.tensor(n, dtype=torch.int32) for name, n in numbers.items()},
            "view_as_float": torch.tensor(int(as_floats), dtype=torch.uint8),
            "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        }  # fmt: skip

    return store, {"quant_method": "hqq", "skip_modules": ["lm_head"]}


FORMATS = {
    "auto-round": (
        auto_round(gptq(), "auto_round:auto_gptq"), "AutoRound, GPTQ, 4 bits, groups of"
    ),
    "auto-round-zeros": (
        auto_round(gptq(symmetric=False, version="gptq_v2"), "auto_round"),
        "repacked as q8_0",
    ),
    "auto-round-3": (
        auto_round(gptq(bits=3, version="gptq_v2"), "auto_round:gptqmodel"), "as q4_0"
    ),
    "auto-round-awq": (auto_round(awq(), "auto_round:auto_awq"), "repacked as q8_0"),
    "auto-round-mixed": (
        auto_round(
            of_two_kinds(), "auto_round:auto_gptq",
            extra_config=of_two_kinds()[1]["extra_config"],
        ), "5 matrices repacked as q4_0, 2 matrices repacked as q8_0",
    ),
    "auto-round-fp8": (
        auto_round(fp8("fp8", per_tensor), "auto_round:fp8_static"), "decoded"
    ),
    "quark-int4": (quark("int4", 64), "Quark, int4: 7 matrices repacked as q4_0"),
    "quark-uint4": (quark("uint4", 64, symmetric=False), "repacked as q8_0"),
    "quark-int4-rows": (quark("int4", pack_method="order"), "repacked as q4_0"),
    "quark-int8-rows": (quark("int8"), "repacked as q8_0"),
    "quark-uint8": (quark("uint8", 32, symmetric=False), "7 matrices decoded"),
    "hqq": (hqq(4, 64, 1), "HQQ: 7 matrices decoded"),
    "hqq-columns": (hqq(2, 16, 0), "HQQ: 7 matrices decoded"),
    "hqq-3": (hqq(3, 32, 1), "HQQ: 7 matrices decoded"),
    "hqq-8-as-floats": (hqq(8, 128, 1, as_floats=True), "HQQ: 7 matrices decoded"),
}  # fmt: skip
