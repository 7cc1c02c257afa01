"""Mixtures of experts in GGUF files, written by the reference package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import open_checkpoint
from inl.device import Device
from inl.errors import CheckpointError
from inl.models import mixtral, qwen3_moe
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, local_runner
from inl.weights.sources import stored_tensors
from stacked_experts import stacked

HIDDEN, INNER, EXPERTS, USED, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 4, 2, 16
LAYERS, VOCAB = 2, 40
LIMITS = Limits(slots=3, blocks=(12,), block_size=4, max_blocks_per_seq=4, vocab=VOCAB)
MIXTRAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": USED}
QWEN3 = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": USED,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
}
FAMILIES = {
    "llama": (mixtral.MODEL, MIXTRAL, gguf.MODEL_ARCH.LLAMA),
    "qwen3moe": (qwen3_moe.MODEL, QWEN3, gguf.MODEL_ARCH.QWEN3MOE),
}
KINDS = {"w1": "gate", "w3": "up", "w2": "down"}


def config_of(fields):
    return {
        **fields,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": float(np.float32(1e-6)),
        "rope_theta": 1e6,
    }


def random_tensors(model, hf):
    """Float32 tensors with one tensor per expert."""
    rng, found = np.random.default_rng(12), {}
    for group in leaves(model.weights(model.config(hf))):
        for param in group.params.values():
            for name, shape in stored_tensors(param).items():
                numbers = 1.4 * rng.standard_normal(shape) / shape[-1] ** 0.5
                found[name] = (1 + numbers if len(shape) == 1 else numbers).astype("f4")
    return found


def interleaved(rows, heads):
    """Rows of q or k in llama.cpp's order: the two halves of a head alternate."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def written(path, architecture, tensors, *, kind="F32", used=USED, single=False):
    _, _, arch = FAMILIES[architecture]
    names = gguf.get_tensor_name_map(arch, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(used)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(INNER)
    for name, values in (tensors if single else stacked(tensors)).items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads and architecture == "llama":
            values = interleaved(values, heads)
        stored = names.get_name(name, (".weight",))
        if single and ".experts." in name:
            _, _, layer, _, _, expert, part, _ = name.split(".")
            stored = f"blk.{layer}.ffn_{KINDS[part]}.{expert}.weight"
        packed = kind if values.ndim == 3 or ".experts." in name else "F32"
        type_ = gguf.GGMLQuantizationType[packed]
        writer.add_tensor(stored, gguf.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model, checkpoint):
    backend = ReferenceBackend(Device("reference"))
    runner = local_runner(backend, model, checkpoint, LIMITS)
    return prompt_logits(runner, [5, 3, 39, 0, 17])


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    model, fields, _ = FAMILIES[request.param]
    hf = config_of(fields)
    return request.param, model, hf, random_tensors(model, hf)


def test_logits_match_the_source_model(family, tmp_path):
    architecture, model, hf, tensors = family
    checkpoint = open_checkpoint(written(tmp_path / "m.gguf", architecture, tensors))
    expected = logits_of(model, MemoryCheckpoint(hf, tensors))
    assert model.config(checkpoint.config) == model.config(hf)
    assert np.array_equal(logits_of(model, checkpoint), expected)
    checkpoint.close()


def test_an_old_file_with_one_tensor_per_expert(tmp_path):
    hf = config_of(MIXTRAL)
    tensors = random_tensors(mixtral.MODEL, hf)
    path = written(tmp_path / "m.gguf", "llama", tensors, single=True, kind="Q8_0")
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(tensors)
    decoded = {name: dequantize(checkpoint.tensor(name)) for name in tensors}
    expected = logits_of(mixtral.MODEL, MemoryCheckpoint(hf, decoded))
    assert np.array_equal(logits_of(mixtral.MODEL, checkpoint), expected)
    checkpoint.close()


def test_quantized_experts_match_the_reference_decoder(family, tmp_path):
    architecture, model, hf, tensors = family
    path = written(tmp_path / "m.gguf", architecture, tensors, kind="Q4_0")
    rounded = dict(tensors)
    kind = gguf.GGMLQuantizationType.Q4_0
    for name, values in tensors.items():
        if ".experts." in name:
            rounded[name] = gguf.dequantize(gguf.quantize(values, kind), kind)
    expected = logits_of(model, MemoryCheckpoint(hf, rounded))
    checkpoint = open_checkpoint(path)
    assert np.array_equal(logits_of(model, checkpoint), expected)
    assert not np.array_equal(logits_of(model, MemoryCheckpoint(hf, tensors)), expected)
    checkpoint.close()


def test_a_bad_number_of_experts_names_its_field(tmp_path):
    tensors = random_tensors(mixtral.MODEL, config_of(MIXTRAL))
    path = written(tmp_path / "m.gguf", "llama", tensors, used=0)
    with pytest.raises(CheckpointError, match=r"llama\.expert_used_count: found 0"):
        open_checkpoint(path)
