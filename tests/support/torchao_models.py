"""Matrices as torchao flattens its subclasses to safetensors, by published arithmetic.

Each function stores a matrix: its values, and its tensors with their metadata.
"""

from __future__ import annotations

import json

import torch

WIDTH = 64


def stored(kind, values, tensors, **fields):
    parts = {f"_weight_{name}": tensor for name, tensor in tensors.items()}
    names = list(tensors)
    text = json.dumps({"_type": kind, "_data": fields, "_tensor_data_names": names})
    return values.float(), parts | {"metadata": text}


def dtype(name):
    return {"_type": "torch.dtype", "_data": name}


def repeated(shared, width=WIDTH):
    return shared.float().repeat_interleave(width, 1)


def int8(weight):
    """Int8WeightOnlyConfig: a scale per row."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    codes = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    tensors = {"qdata": codes, "scale": scale}
    tensors["zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
    block = [1, weight.shape[1]]
    return stored(
        "Int8Tensor", codes * scale, tensors, block_size=block, dtype=dtype("float32")
    )


def intx(bits, symmetric=True):
    """IntxWeightOnlyConfig and Int8DynamicActivationIntxWeightConfig."""

    def store(weight):
        groups = weight.reshape(len(weight), -1, WIDTH)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        least, top = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        span = 2 * torch.maximum(-low, high) if symmetric else high - low
        scale = (span / (top - least)).to(torch.bfloat16)
        zero = torch.zeros_like(scale)
        if not symmetric:
            zero = (least - low / scale.float()).round().clamp(least, top)
        codes = (weight / repeated(scale)).round() + repeated(zero)
        codes = codes.clamp(least, top).to(torch.int8)
        tensors = {"qdata": codes, "scale": scale, "zero_point": zero.to(torch.int8)}
        return stored(
            "IntxUnpackedToInt8Tensor", (codes - repeated(zero)) * repeated(scale),
            tensors, target_dtype=dtype(f"int{bits}"), block_size=[1, WIDTH],
            dtype=dtype("bfloat16"), activation_quantization="int8_asym_per_token",
        )  # fmt: skip

    return store


def floored(weight, size):
    """Codes from 0 to 15, scales, and values of the code 8."""
    groups = weight.reshape(len(weight), -1, WIDTH)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).to(torch.bfloat16)
    middle = (low + 8 * scale.float()).to(torch.bfloat16)
    codes = ((weight - repeated(middle)) / repeated(scale) + 8).round().clamp(0, 15)
    values = (codes - 8) * repeated(scale) + repeated(middle)
    assert codes.shape[1] == size
    return codes.to(torch.int64), scale, middle, values


def int4(weight):
    """Int4WeightOnlyConfig, packing format "plain"."""
    codes, scale, middle, values = floored(weight, weight.shape[1])
    signed = codes - 8 & 15
    data = (signed[:, ::2] | signed[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    tensors = {
        "qdata": data, "scale": scale.T.contiguous(),
        "zero_point": middle.T.contiguous(),
    }  # fmt: skip
    return stored(
        "Int4Tensor", values, tensors, block_size=[1, WIDTH], shape=list(weight.shape),
        activation_dtype=dtype("bfloat16"),
    )  # fmt: skip


def tiles(weight):
    """Int4WeightOnlyConfig, packing format "tile_packed_to_4d": word by word."""
    rows, size = weight.shape
    codes, scale, middle, values = floored(weight, size)
    padded = torch.zeros(rows, -(-size // 1024) * 1024, dtype=torch.int64)
    padded[:, :size] = codes
    outer = padded.shape[1] // 128
    words = torch.zeros(rows // 8, outer, 32, 4, dtype=torch.int64)
    steps = [0, 8, 16, 24, 1, 9, 17, 25]  # the columns of a word, lowest bits first
    for lane in range(32):
        row, first = lane // 4, lane % 4 * 2
        for place in range(4):
            for at, step in enumerate(steps):
                columns = [
                    128 * each + 32 * place + first + step for each in range(outer)
                ]
                words[:, :, lane, place] |= padded[row::8, columns] << 4 * at
    both = torch.zeros(padded.shape[1] // WIDTH, rows, 2, dtype=torch.bfloat16)
    both[: size // WIDTH] = torch.stack([scale.T, middle.T], -1)
    tensors = {
        "qdata": words.to(torch.uint32).view(torch.int32), "scale_and_zero": both,
    }  # fmt: skip
    return stored(
        "Int4TilePackedTo4dTensor", values, tensors, block_size=[1, WIDTH],
        shape=[rows, size],
    )  # fmt: skip


def float8(weight):
    """Float8WeightOnlyConfig: a scale per row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return stored(
        "Float8Tensor", codes.float() * scale, {"qdata": codes, "scale": scale},
        block_size=[1, weight.shape[1]], dtype=dtype("bfloat16"),
    )  # fmt: skip


def config(kind):
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}},
    }


SEVEN = "7 matrices"
FORMATS = {
    "torchao-int8": (
        (int8, config("Int8WeightOnlyConfig")),
        f"torchao Int8WeightOnlyConfig: {SEVEN} decoded",
    ),
    "torchao-intx4": (
        (intx(4), config("Int8DynamicActivationIntxWeightConfig")), "repacked as q4_0"
    ),
    "torchao-intx4-zeros": (
        (intx(4, False), config("IntxWeightOnlyConfig")), "repacked as q8_0"
    ),
    "torchao-intx6": ((intx(6), config("IntxWeightOnlyConfig")), "repacked as q8_0"),
    "torchao-int4": (
        (int4, config("Int4WeightOnlyConfig")), f"{SEVEN} decoded"
    ),
    "torchao-int4-tiles": (
        (tiles, config("Int4WeightOnlyConfig")), f"{SEVEN} decoded"
    ),
    "torchao-fp8": (
        (float8, config("Float8WeightOnlyConfig")), f"{SEVEN} decoded"
    ),
}  # fmt: skip
