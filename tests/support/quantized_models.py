"""Models quantized by the published arithmetic of each format, element by element."""

from __future__ import annotations

import json

import safetensors.torch as safetensors
import torch

VOCAB = 96
HIDDEN, INNER = 128, 256
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (64, HIDDEN),
    "self_attn.v_proj": (64, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
"""The table of QLoRA (Dettmers et al., 2023)."""


COMPRESSED = {"quant_method": "compressed-tensors"}


def words(codes, bits, order=None):
    """Codes of the last axis in words of 32 bits; ``order``: the place of each code."""
    if bits == 3:
        return words_of_3_bits(codes)
    per = 32 // bits
    order = order or range(per)
    grouped = codes.reshape(*codes.shape[:-1], -1, per).to(torch.int64)
    packed = sum(grouped[..., at] << bits * place for at, place in enumerate(order))
    return packed.to(torch.uint32).view(torch.int32)


def words_of_3_bits(codes):
    """Bit by bit: bit b of code c is bit ``3 * c + b`` of a row of words."""
    rows = codes.reshape(-1, codes.shape[-1]).to(torch.int64)
    bits = torch.stack([rows >> bit & 1 for bit in range(3)], -1).reshape(len(rows), -1)
    packed = (bits.reshape(len(rows), -1, 32) << torch.arange(32)).sum(-1)
    return packed.to(torch.uint32).view(torch.int32).reshape(*codes.shape[:-1], -1)


def grouped(weight, bits, width, symmetric, columns=None):
    """Codes [N, K], scales and zeros [N, G] of groups of columns, and the values."""
    size = weight.shape[1]
    columns = torch.arange(size) // width if columns is None else columns
    top = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(columns.max()) + 1):
        part = weight[:, columns == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).to(torch.float16)
        zero = (-low / scale).round().clamp(0, top)
        zeros.append(torch.full_like(zero, 2 ** (bits - 1)) if symmetric else zero)
        scales.append(scale)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / scale[:, columns] + zero[:, columns]).round().clamp(0, top)
    values = (codes - zero[:, columns]) * scale[:, columns].float()
    return codes, scale, zero, values


def gptq(bits=4, width=64, symmetric=True, ordered=False, version="gptq"):
    def store(weight):
        size = weight.shape[1]
        columns = torch.arange(size) // width
        if ordered:
            columns = columns[torch.randperm(size)]
        codes, scale, zero, values = grouped(weight, bits, width, symmetric, columns)
        zero = zero - 1 if version == "gptq" else zero
        return values, {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(zero.T.contiguous() % 2**bits, bits),
            "scales": scale.T.contiguous(),
            "g_idx": columns.to(torch.int32),
        }

    return store, {
        "quant_method": "gptq", "bits": bits, "group_size": width, "sym": symmetric,
        "desc_act": ordered, "checkpoint_format": version,
    }  # fmt: skip


def awq():
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of column 0, 1, 2, ... in a word

    def store(weight):
        codes, scale, zero, values = grouped(weight, 4, 64, False)
        return values, {
            "qweight": words(codes.T.contiguous(), 4, order),
            "qzeros": words(zero.T.contiguous(), 4, order),
            "scales": scale.T.contiguous(),
        }

    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    return store, config | {"zero_point": True}


def fp8(method, scale_of, name="weight_scale", **options):
    """``scale_of``: (weight) -> scales, and the same for each element."""

    def store(weight):
        scale, each = scale_of(weight)
        stored = (weight / each).to(torch.float8_e4m3fn)
        return stored.float() * each, {"weight": stored, name: scale}

    return store, {"quant_method": method, **options}


def per_tensor(weight):
    scale = weight.abs().max() / 448
    return scale, scale


def per_row(weight):
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return scale, scale.float()


def per_block(weight, block=48):
    rows, size = (-(-each // block) for each in weight.shape)
    scale = torch.empty(rows, size)
    each = torch.empty_like(weight)
    for row in range(rows):
        for column in range(size):
            at = slice(row * block, (row + 1) * block)
            to = slice(column * block, (column + 1) * block)
            scale[row, column] = each[at, to] = weight[at, to].abs().max() / 448
    return scale, each


def per_block_of_powers(weight):
    scale, each = (2 ** one.log2().ceil() for one in per_block(weight))
    return scale.to(torch.float8_e8m0fnu), each


def int8_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return codes * scale, {"weight": codes, "weight_scale": scale}


def int8_zeros(width):
    """Signed codes of 8 bits with zero points of groups of ``width``, or of rows."""

    def store(weight):
        size = width or weight.shape[1]
        codes, scale, zero, values = grouped(weight, 8, size, False)
        return values, {
            "weight": (codes - 128).to(torch.int8),
            "weight_scale": scale,
            "weight_zero_point": (zero - 128).to(torch.int8),
        }

    return store, COMPRESSED | {"format": "int-quantized"}


def int8_blocks(weight, block=48):
    """Signed codes of 8 bits with a zero point for each square block."""
    rows, size = (-(-each // block) for each in weight.shape)
    scale, zero = torch.empty(rows, size), torch.empty(rows, size, dtype=torch.int8)
    codes, values = torch.empty_like(weight, dtype=torch.int8), weight.clone()
    for row in range(rows):
        for column in range(size):
            at = slice(row * block, (row + 1) * block)
            to = slice(column * block, (column + 1) * block)
            part = weight[at, to]
            low, high = part.min(), part.max()
            scale[row, column] = step = (high - low) / 255
            zero[row, column] = shift = (-128 - low / step).round().clamp(-128, 127)
            codes[at, to] = stored = (part / step + shift).round().clamp(-128, 127)
            values[at, to] = (stored - shift) * step
    return values, {"weight": codes, "weight_scale": scale, "weight_zero_point": zero}


def packed(symmetric, bits=4, width=64, ordered=False):
    def store(weight):
        width_of = width or weight.shape[1]
        columns = torch.arange(weight.shape[1]) // width_of
        if ordered:
            columns = columns[torch.randperm(len(columns))]
        codes, scale, zero, values = grouped(weight, bits, width_of, symmetric, columns)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": scale,
        }
        if ordered:
            tensors["weight_g_idx"] = columns.to(torch.int32)
        if not symmetric:
            zeros = words(zero.T.contiguous(), bits)
            tensors["weight_zero_point"] = zeros.T.contiguous()
        return values, tensors

    return store, {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def nf4(nested):
    def store(weight):
        flat = weight.reshape(-1, 64)
        table, most = torch.tensor(NF4), flat.abs().amax(1)
        tensors, state = {"weight.absmax": most}, {}
        if nested:
            codes = torch.linspace(-1, 1, 256)
            offset = most.mean()
            nested_most = torch.stack(
                [part.abs().max() for part in (most - offset).split(256)]
            )
            spread = torch.repeat_interleave(nested_most, 256)[: len(most)]
            near = ((most - offset) / spread)[:, None] - codes
            index = near.abs().argmin(1)
            most = codes[index] * spread + offset
            tensors = {
                "weight.absmax": index.to(torch.uint8),
                "weight.nested_absmax": nested_most,
                "weight.nested_quant_map": codes,
            }
            state = {"nested_blocksize": 256, "nested_offset": float(offset)}
        codes = (flat / most[:, None])[:, :, None] - table
        index = codes.abs().argmin(2)
        values = (table[index] * most[:, None]).reshape(weight.shape)
        pairs = index.reshape(-1, 2)
        text = json.dumps(
            {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), **state}
        )
        return values, tensors | {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(text.encode()), dtype=torch.uint8
            ),
        }

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return store, config | {"bnb_4bit_quant_type": "nf4"}


def bnb_int8(weight):
    most = weight.abs().amax(1)
    codes = (weight * 127 / most[:, None]).round().to(torch.int8)
    return codes * most[:, None] / 127, {
        "weight": codes,
        "SCB": most,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


DYNAMIC = {"group_0": {"input_activations": {"num_bits": 8, "dynamic": True}}}
BLOCKS = {"name": "weight_scale_inv", "weight_block_size": [48, 48]}
FORMATS = {
    "gptq": (gptq(), "repacked as q4_0"),
    "gptq-v2": (gptq(version="gptq_v2"), "repacked as q4_0"),
    "gptq-act-order": (gptq(ordered=True), "act-order: 7 matrices decoded"),
    "gptq-asymmetric": (gptq(symmetric=False), "repacked as q8_0"),
    "gptq-one-group": (gptq(width=HIDDEN, symmetric=False), "repacked as q8_0"),
    "gptq-8": (gptq(bits=8), "GPTQ, 8 bits, groups of 64: 7 matrices repacked as q8_0"),
    "gptq-2": (gptq(bits=2, symmetric=False), "repacked as q8_0"),
    "gptq-3": (
        gptq(bits=3), "GPTQ, 3 bits, groups of 64: 7 matrices repacked as q4_0"
    ),
    "gptq-3-act-order": (
        gptq(bits=3, symmetric=False, ordered=True), "act-order: 7 matrices decoded"
    ),
    "awq": (awq(), "AWQ, 4 bits, groups of 64: 7 matrices repacked as q8_0"),
    "fp8-tensor": (fp8("fp8", per_tensor), "FP8: 7 matrices decoded"),
    "fp8-blocks": (fp8("fp8", per_block, **BLOCKS), "FP8, blocks of 48 x 48"),
    "fp8-powers": (
        fp8("fp8", per_block_of_powers, **BLOCKS), "FP8, blocks of 48 x 48"
    ),
    "compressed-fp8-rows": (
        fp8("compressed-tensors", per_row, format="float-quantized"), "float-quantized"
    ),
    "compressed-fp8-dynamic": (
        fp8("compressed-tensors", per_row, config_groups=DYNAMIC), "decoded"
    ),
    "compressed-int8": (
        (int8_rows, COMPRESSED | {"format": "int-quantized"}),
        "int-quantized: 7 matrices decoded",
    ),
    "compressed-int4": (packed(True), "pack-quantized: 7 matrices repacked as q4_0"),
    "compressed-int4-zeros": (packed(False), "repacked as q8_0"),
    "compressed-int8-zeros": (packed(False, bits=8), "7 matrices decoded"),
    "compressed-int4-rows": (packed(False, width=0), "repacked as q8_0"),
    "compressed-int8-rows-packed": (packed(True, bits=8, width=0), "as q8_0"),
    "compressed-int4-act-order": (packed(False, ordered=True), "7 matrices decoded"),
    "compressed-int8-rows-zeros": (int8_zeros(0), "7 matrices decoded"),
    "compressed-int8-groups-zeros": (int8_zeros(32), "7 matrices decoded"),
    "compressed-int8-blocks-zeros": (
        (int8_blocks, COMPRESSED | {
            "format": "int-quantized",
            "config_groups": {"a": {"weights": {"block_structure": [48, 48]}}},
        }), "7 matrices decoded",
    ),
    "compressed-mixed": (
        (int8_rows, COMPRESSED | {
            "format": "mixed-precision",
            "config_groups": {"a": {"format": "int-quantized"}},
        }), "7 matrices decoded",
    ),
    "nf4": (nf4(False), "bitsandbytes NF4: 7 matrices decoded"),
    "nf4-nested": (nf4(True), "bitsandbytes NF4"),
    "bnb-int8": (
        (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "bitsandbytes int8: 7 matrices decoded",
    ),
}  # fmt: skip


def saved(form, path, formats=FORMATS):
    """Write the quantized model and one of its values; return both folders."""
    store, config = formats[form][0]
    torch.manual_seed(1)
    plain = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5,
        "model.norm.weight": torch.ones(HIDDEN),
        "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    small, metadata = dict(plain), {}
    for name, shape in SHAPES.items():
        stem = f"model.layers.0.{name}"
        values, tensors = store(1.6 * torch.randn(shape) / shape[1] ** 0.5)
        metadata[f"{stem}.weight"] = tensors.pop("metadata", "")
        plain[f"{stem}.weight"] = values.float().contiguous()
        small |= {f"{stem}.{part}": tensor for part, tensor in tensors.items()}
    folders = path / "small", path / "plain"
    extra = {"quantization_config": config}
    for folder, tensors, fields in zip(
        folders, (small, plain), (extra, {}), strict=True
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | fields))
        safetensors.save_file(tensors, folder / "model.safetensors", metadata)
    return folders
