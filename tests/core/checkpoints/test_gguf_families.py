"""Files of other families than Llama, written by the reference package."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.gguf.names import FAMILIES, hf_name
from inl.errors import CheckpointError
from inl.models import qwen2

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
LETTERS = ["<s>", "</s>", *"abcd"]


def written(path, architecture, tensors, fill=lambda writer: None):
    """Write a file with the name map of the reference package, like its converter."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    fill(writer)
    for name, values in tensors.items():
        found = names.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(found, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer_names(*parts):
    return [f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in parts]


QWEN2 = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    *layer_names(
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(
            f"self_attn.{one}_proj.{kind}"
            for one in "qkv"
            for kind in ("weight", "bias")
        ),
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ),
]
GEMMA3_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
GEMMA3 = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *layer_names(
        *(f"{one}.weight" for one in GEMMA3_NORMS),
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
    ),
]


def numbered(names):
    """A small tensor for each name, all different."""
    return {name: [[index, index + 0.5]] for index, name in enumerate(names)}


@pytest.mark.parametrize(
    ("architecture", "names"), [("qwen2", QWEN2), ("gemma3", GEMMA3)]
)
def test_names_match_the_reference_package(architecture, names):
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)
    known = FAMILIES[architecture].layer_names
    for name in names:
        stored = theirs.get_name(name, (".weight", ".bias"))
        assert hf_name(stored, known) == name


def test_qwen2_tensors_round_trip(tmp_path):
    tensors = numbered(QWEN2)
    checkpoint = open_checkpoint(written(tmp_path / "q.gguf", "qwen2", tensors))
    assert set(checkpoint.names()) == set(QWEN2)
    for name, values in tensors.items():
        assert checkpoint.tensor(name).data.tolist() == values
    checkpoint.close()


def test_qwen2_config(tmp_path):
    checkpoint = open_checkpoint(written(tmp_path / "q.gguf", "qwen2", numbered(QWEN2)))
    found = checkpoint.config
    assert found["architectures"] == ["Qwen2ForCausalLM"]
    assert found["model_type"] == "qwen2"
    assert found["head_dim"] == HIDDEN // HEADS
    assert found["rope_theta"] == 1e6
    assert found["attention_bias"] is True
    assert found["tie_word_embeddings"] is False
    config = qwen2.config(found)
    assert config.qkv_bias
    assert not config.tied


def test_qwen2_has_biases_by_default(tmp_path):
    tied = numbered(name for name in QWEN2 if name != "lm_head.weight")
    checkpoint = open_checkpoint(written(tmp_path / "q.gguf", "qwen2", tied))
    assert checkpoint.config["tie_word_embeddings"] is True
    published = {
        key: value
        for key, value in checkpoint.config.items()
        if key not in ("attention_bias", "mlp_bias", "head_dim")
    }
    sources = [
        param.source
        for layer in qwen2.MODEL.weights(qwen2.config(published)).layers
        for group in (layer.attention.qkv, layer.attention.out)
        for param in group.params.values()
    ]
    assert [name for name in sources if name.endswith("bias")] == layer_names(
        *(f"self_attn.{one}_proj.bias" for one in "qkv")
    )


def test_gemma3_config_and_norms(tmp_path):
    def fill(writer):
        writer.add_key_length(256)
        writer.add_sliding_window(512)

    tensors = numbered(GEMMA3)
    checkpoint = open_checkpoint(written(tmp_path / "g.gguf", "gemma3", tensors, fill))
    found = checkpoint.config
    assert found["architectures"] == ["Gemma3ForCausalLM"]
    assert found["model_type"] == "gemma3_text"
    assert found["head_dim"] == found["query_pre_attn_scalar"] == 256
    assert found["layer_types"] == ["sliding_attention"] * 2
    assert found["sliding_window"] == 512
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["hidden_activation"] == "gelu_pytorch_tanh"
    assert set(checkpoint.names()) == set(GEMMA3)
    for name, values in tensors.items():
        offset = 1 if name.endswith("norm.weight") else 0
        expected = [[value - offset for value in values[0]]]
        assert checkpoint.tensor(name).data.tolist() == expected


def llama3_divisor(place, half, factor, theta=1e6):
    """Frequency divisor of one pair, written from the paper's description."""
    wavelength = 2 * math.pi * theta ** (place / half)
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192:
        return factor
    share = (8192 / wavelength - 1) / 3
    return 1 / ((1 - share) / factor + share)


def test_llama3_frequencies_become_a_config_field(tmp_path):
    half = HIDDEN // HEADS // 2
    divisors = [llama3_divisor(place, half, 32.0) for place in range(half)]
    assert 1.0 < sorted(divisors)[-2] <= 32.0
    path = written(
        tmp_path / "l.gguf", "llama", {"rope_freqs.weight": divisors, "x": [1.0]}
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == ["x"]
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("divisors", "parts"),
    [
        ([1.0, 2.0, 3.0], ["float32 [3]", "float32 [8]"]),
        ([2.0] * 8, ["up to 2", "another rule", "Llama 3.1 to 3.3"]),
        ([math.nan] * 8, ["up to nan"]),
        ([0.0] * 8, ["up to 0"]),
    ],
)
def test_unknown_frequency_divisors_are_refused(divisors, parts, tmp_path):
    path = written(tmp_path / "l.gguf", "llama", {"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match="accepted") as caught:
        open_checkpoint(path)
    for part in ["l.gguf", "'rope_freqs.weight'", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "full"),
    [(None, [5]), (6, [5]), (2, [1, 3, 5]), ([True, False] * 3, [1, 3, 5])],
)
def test_the_layers_of_gemma3_with_full_attention(tmp_path, pattern, full):
    def fill(writer):
        writer.kv_data[0]["gemma3.block_count"].value = 6
        writer.add_sliding_window(16)
        if pattern:
            writer.add_sliding_window_pattern(pattern)

    path = written(tmp_path / "m.gguf", "gemma3", {}, fill)
    kinds = open_checkpoint(path).config["layer_types"]
    assert [at for at, kind in enumerate(kinds) if kind == "full_attention"] == full


def test_matrices_of_nvfp4_have_a_factor(tmp_path):
    """As llama.cpp writes them: blocks, and a float beside each matrix."""
    path, rng = tmp_path / "model.gguf", np.random.default_rng(5)
    kind = gguf.GGMLQuantizationType.NVFP4
    blocks = rng.integers(0, 126, (INNER, HIDDEN // 64 * 36), np.uint8)

    def fill(writer):
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)
        writer.add_tensor("blk.1.ffn_up.weight", blocks, raw_dtype=kind)
        writer.add_tensor("blk.1.ffn_up.scale", np.float32([0.37]))
        writer.add_tensor("blk.1.ffn_up.input_scale", np.float32([2]))

    checkpoint = open_checkpoint(written(path, "qwen2", {}, fill))
    plain, scaled = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
    assert sorted(checkpoint.names()) == [plain, scaled]
    assert checkpoint.spec(plain) == ("nvfp4", (INNER, HIDDEN))
    assert checkpoint.spec(scaled) == ("float32", (INNER, HIDDEN))
    expected = gguf.dequantize(blocks, kind)
    found = checkpoint.tensor(scaled).data
    np.testing.assert_array_equal(found, expected * np.float32(0.37))
    checkpoint.close()
