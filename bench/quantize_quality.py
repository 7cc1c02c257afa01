"""Perplexity of a model whose matrices INL quantizes while it loads them.

``python bench/quantize_quality.py`` decodes the default model to a checkpoint in
bfloat16 and reads a text with it as stored and with each kind of ``--quantize``, on the
CPU in float32 and in its default dtype. The default model was quantized before: so that
its codes are not found again, random factors of up to 1.19 are moved from norms into
the matrices behind them, and from one matrix into the next, which changes no result.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from cpu_quality import TEXTS, log_probabilities, logits_of, open_runner
from safetensors.torch import save_file
from torch import from_numpy

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model
from inl.weights.quantize.report import KINDS

DTYPES = "float32", "bfloat16"


def rescaled(tensors, config):
    """The same function with other weights: those of a Llama, by name."""
    rng, found = np.random.default_rng(0), dict(tensors)

    def factors(size):
        return np.exp2(rng.uniform(-0.25, 0.25, size)).astype(np.float32)

    def scale(name, rows=None, columns=None):
        weight = found[f"{name}.weight"]
        weight = weight if rows is None else weight * rows[:, None]
        found[f"{name}.weight"] = weight if columns is None else weight * columns

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for norm, readers in (
            ("input_layernorm", [f"{at}self_attn.{name}_proj" for name in "qkv"]),
            ("post_attention_layernorm", [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]),
        ):
            columns = factors(config["hidden_size"])
            for name in readers:
                scale(name, columns=columns)
            found[f"{at}{norm}.weight"] = found[f"{at}{norm}.weight"] / columns
        inner = factors(len(found[f"{at}mlp.up_proj.weight"]))
        scale(f"{at}mlp.up_proj", rows=inner)
        scale(f"{at}mlp.down_proj", columns=1 / inner)
        values = factors((kv_heads, len(found[f"{at}self_attn.v_proj.weight"])
                          // kv_heads))  # fmt: skip
        scale(f"{at}self_attn.v_proj", rows=values.reshape(-1))
        shared = values.repeat(heads // kv_heads, 0).reshape(-1)
        scale(f"{at}self_attn.o_proj", columns=1 / shared)
    return found


def write(language, folder):
    """Write the decoded model in bfloat16."""
    checkpoint = language.checkpoint
    plain = {name: dequantize(checkpoint.tensor(name)) for name in checkpoint.names()}
    config = {k: v for k, v in checkpoint.config.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: from_numpy(np.array(x)).bfloat16()
        for name, x in rescaled(plain, config).items()
    }
    save_file(tensors, folder / "model.safetensors")


def perplexity(language, ids, dtype):
    runner = open_runner(language, "cpu", dtype, len(ids))
    logits = np.concatenate(list(logits_of(runner, ids, 64)))
    runner.close()
    found = log_probabilities(logits)[:-1]
    return float(np.exp(-found[np.arange(len(found)), ids[1:]].mean()))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="a Llama")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--text", type=Path, default=TEXTS[0])
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    language = open_model(resolve_model(given.model))
    tokenizer = language.checkpoint.tokenizer()
    ids = tokenizer.encode(given.text.read_text("utf-8"))[: given.tokens]
    with tempfile.TemporaryDirectory() as place:
        write(language, Path(place))
        print(f"{language.name} decoded, {len(ids)} tokens of {given.text.name}")
        plain = {}
        for kind in (None, *given.kinds):
            for dtype in DTYPES:
                opened = open_model(place)
                opened = opened.quantized(kind) if kind else opened
                value = perplexity(opened, ids, dtype)
                change = 100 * (value / plain.setdefault(dtype, value) - 1)
                label = f"{kind or 'as stored':<10} {dtype:<9}"
                print(f"{label} {value:8.4f} ({change:+.2f} %)", flush=True)
                if kind:
                    print(f"  {opened.quantization.describe()}", flush=True)


if __name__ == "__main__":
    main()
