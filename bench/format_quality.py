"""Perplexity of quantized checkpoints beside the outside implementation of the format.

``python bench/format_quality.py`` decodes the default model to a checkpoint, quantizes
it in each format, and reads a text with each: transformers with the matrices that the
outside tool dequantizes, in float32, and INL with the quantized files, on the CPU in
float32 and in its default dtype, which rounds inputs of products. Formats of torchao,
bitsandbytes and compressed-tensors are written and dequantized by these packages and
left out without them; those of GPTQ, AWQ and FP8 by their published arithmetic, see
``tests/support/quantized_models.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch as safetensors
import torch
import transformers
from cpu_quality import HERE, TEXTS, log_probabilities, logits_of, open_runner

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model

sys.path.append(str(HERE / "tests/support"))
import quantized_models as published


def with_torchao(make, weight):
    """A matrix that torchao quantizes, as it flattens it, and dequantized."""
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
    )
    from torchao.quantization import quantize_

    rows, columns = weight.shape
    module = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
    module[0].weight.data = weight.clone()
    quantize_(module, make())
    tensors, metadata = flatten_tensor_state_dict(module.state_dict())
    parts = {name.removeprefix("0."): one for name, one in tensors.items()}
    parts["metadata"] = metadata["0.weight"]
    return module[0].weight.dequantize().float(), parts


def torchao(kind, **options):
    def make():
        from torchao import quantization

        named = {
            name: getattr(quantization, one) if isinstance(one, str) else one
            for name, one in options.items()
        }
        if "granularity" in named:
            named["granularity"] = quantization.PerGroup(named["granularity"])
        return getattr(quantization, kind)(**named)

    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}}
    return partial(with_torchao, make), config


def bnb_nf4(weight):
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    parts = {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    return functional.dequantize_4bit(codes, state).float(), {"weight": codes, **parts}


def bnb_int8(weight):
    from bitsandbytes import functional

    codes, most, _ = functional.int8_vectorwise_quant(weight.half())
    parts = {"weight": codes, "SCB": most.float()}
    return functional.int8_vectorwise_dequant(codes, most).float(), parts


def packed(weight):
    """Codes that the package compressed-tensors packs; symmetric groups of 64."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes, scale, zero, values = published.grouped(weight, 4, 64, True)
    stored = pack_to_int32((codes - zero.repeat_interleave(64, 1)).to(torch.int8), 4)
    shape = torch.tensor(weight.shape)
    return values, {
        "weight_packed": stored, "weight_shape": shape, "weight_scale": scale,
    }  # fmt: skip


FORMATS = {name: one[0] for name, one in published.FORMATS.items() if name in (
    "gptq", "gptq-act-order", "gptq-8", "awq", "fp8-tensor", "compressed-fp8-rows",
    "compressed-int8",
)} | {
    "fp8-blocks": (
        published.fp8("fp8", partial(published.per_block, block=128),
                      name="weight_scale_inv", weight_block_size=[128, 128])
    ),
    "compressed-int4": (
        packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    ),
    "nf4": (bnb_nf4, published.nf4(False)[1]),
    "bnb-int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-int4": torchao(
        "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=64
    ),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
}  # fmt: skip
DTYPES = "float32", "bfloat16"
MATRICES = tuple(f"{name}.weight" for name in published.SHAPES)


def decoded(checkpoint):
    """The tensors of a checkpoint in float32."""
    tensors = {}
    for name in checkpoint.names():
        tensors[name] = torch.from_numpy(dequantize(checkpoint.tensor(name)).copy())
    return tensors


def perplexity(logits, ids):
    found = log_probabilities(np.asarray(logits, np.float64))[:-1]
    return float(np.exp(-found[np.arange(len(found)), ids[1:]].mean()))


def outside(model, ids):
    with torch.no_grad():
        return perplexity(model(torch.tensor([ids])).logits[0], ids)


def inside(folder, ids, dtype):
    language = open_model(folder)
    runner = open_runner(language, "cpu", dtype, len(ids))
    logits = np.concatenate(list(logits_of(runner, ids, 64)))
    runner.close()
    return perplexity(logits, ids), language.checkpoint.rounded("q8_0").notes[0]


def quantized(plain, form, folder, config):
    """Write a checkpoint; return the matrices that the outside tool dequantizes."""
    store, options = FORMATS[form]
    tensors, metadata, values = {}, {}, {}
    for name, weight in plain.items():
        if not name.endswith(MATRICES):
            tensors[name] = weight
            continue
        stem = name.removesuffix("weight")
        values[name], parts = store(weight)
        metadata[name] = parts.pop("metadata", "")
        tensors |= {f"{stem}{part}": one.contiguous() for part, one in parts.items()}
    folder.mkdir()
    fields = json.dumps(config | {"quantization_config": options})
    (folder / "config.json").write_text(fields)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata)
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--text", type=Path, default=TEXTS[0])
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    torch.manual_seed(0)
    language = open_model(resolve_model(given.model))
    checkpoint = language.checkpoint
    ids = checkpoint.tokenizer().encode(given.text.read_text("utf-8"))[: given.tokens]
    plain = decoded(checkpoint)
    config = {
        name: value for name, value in checkpoint.config.items() if value is not None
    }
    hf = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    model.load_state_dict(plain, strict=False)
    model.eval()
    print(f"{language.name}, {len(ids)} tokens of {given.text.name}")
    print(f"not quantized again: outside {outside(model, ids):.4f}")
    for form in given.formats:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / form
            try:
                values = quantized(plain, form, folder, config)
            except ImportError as error:
                print(f"{form:<20} left out: {error}")
                continue
            model.load_state_dict(values, strict=False)
            expected = outside(model, ids)
            found = {each: inside(folder, ids, each) for each in DTYPES}
        columns = "  ".join(
            f"{each} {value:8.4f} ({100 * (value / expected - 1):+.3f} %)"
            for each, (value, _) in found.items()
        )
        note = found["bfloat16"][1]
        print(f"{form:<20} outside {expected:8.4f}  {columns}  {note}", flush=True)


if __name__ == "__main__":
    main()
