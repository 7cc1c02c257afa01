"""Small valid model files, written by the reference package of each format."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
LETTERS = [
    *(chr(256 + place) for place in range(33)),
    *map(chr, range(33, 125)),
    "ab",
    "abc",
]


def llama_tensors(rng):
    """A tied two-layer Llama in the Hugging Face layout."""
    tensors = {
        "model.embed_tokens.weight": (len(LETTERS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        tensors |= {
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
            f"{stem}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{stem}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{stem}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in tensors.items()
    }


def interleaved(rows, heads):
    """Rows of q or k as llama.cpp stores them, one row at a time."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for pair in range(size // 2):
            for side in range(2):
                target = head * size + 2 * pair + side
                out[target] = rows[head * size + side * (size // 2) + pair]
    return out


def write_gguf(path, tensors, *, kind=gguf.GGMLQuantizationType.F32):
    """Write a GGUF file with the reference package and its name map."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([3, 3, *[1] * (len(LETTERS) - 2)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")
    for name, values in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleaved(values, heads) if heads else values
        packed = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, (".weight",)),
            gguf.quantize(stored, packed),
            raw_dtype=packed,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tensors():
    return llama_tensors(np.random.default_rng(7))


@pytest.fixture(scope="session")
def gguf_writer():
    return write_gguf


@pytest.fixture
def tiny_gguf(tmp_path, tensors) -> Path:
    """The tiny Llama as a valid float32 GGUF."""
    return write_gguf(tmp_path / "tiny.gguf", tensors)


@pytest.fixture(scope="session")
def default_checkpoint():
    """SmolLM2-135M-Instruct, downloaded by the first test run on a machine."""
    from inl.checkpoints.checkpoint import open_checkpoint
    from inl.checkpoints.hub.resolve import default_model

    checkpoint = open_checkpoint(default_model())
    yield checkpoint
    checkpoint.close()
