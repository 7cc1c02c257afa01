"""The GGUF form of every family, against transformers and the safetensors form.

Files are written by the ``gguf`` package under the names of its own tensor map, with
the keys and the conventions of llama.cpp's converter.
"""

from __future__ import annotations

import importlib

import gguf
import numpy as np
import pytest

from inl.errors import CheckpointError, WeightMismatch
from inl.executor.model_loader import open_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
families = importlib.import_module("families")

BOUND = 1e-4
FORMS = families.GGUF_FORMS


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model as safetensors and as GGUF, made once."""
    found = {}

    def get(name):
        if name not in found:
            architecture, changes = FORMS[name]
            folder = tmp_path_factory.mktemp(name)
            one = families.make(name, folder, **changes)
            path = folder.with_suffix(".gguf")
            write(path, architecture, open_model(folder).checkpoint)
            found[name] = one, path
        return found[name]

    return get


def write(path, architecture, source, *, change=lambda tensors: tensors):
    """Write a checkpoint's config and tensors as llama.cpp's converter would."""
    config = source.config
    writer = gguf.GGUFWriter(path, architecture)
    write_sizes(writer, config, architecture)
    write_rope(writer, config, architecture)
    letters = [f"<{index}>" for index in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"]
    )
    tensors = {name: source.tensor(name).data for name in source.names()}
    for name, values in change(tensors).items():
        stored = names.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(stored, converted(architecture, config, name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer, config, architecture):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)


def write_rope(writer, config, architecture):
    rope = config["rope_parameters"]
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if architecture != "gemma2":  # whose converter trusts the default
        writer.add_rope_freq_base(rope["rope_theta"])
    heads = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    if architecture == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(share * heads))
        size = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(size)
    if architecture == "llama":
        writer.add_rope_dimension_count(heads)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        size = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(size)
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if kind == "longrope":
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3(rope, heads))


def llama3(rope, heads):
    """What each pair is slowed down by, as the converter works it out."""
    found = []
    for rate in rope["rope_theta"] ** (-np.arange(0, heads, 2) / heads):
        wave, trained = 2 * np.pi / rate, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wave < trained / high:
            found.append(1.0)
        elif wave > trained / low:
            found.append(rope["factor"])
        else:
            kept = (trained / wave - low) / (high - low)
            found.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(found, np.float32)


def converted(architecture, config, name, values):
    """What the converter does to a tensor."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if architecture == "llama" and part in counts:
        heads = config[counts[part]]
        split = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
        return split.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_transformers_and_of_safetensors(name, made):
    one, path = made(name)
    backend = families.reference()
    language = open_model(path)
    found = families.logits(families.load(language, backend, "float64"), one.ids)
    assert families.distance(found, one.logits) < BOUND
    same = families.logits(families.opened(one, backend, "float64"), one.ids)
    # Files hold eps and frequencies in float32.
    assert families.distance(found, same) < 1e-6


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama-linear"])
def test_a_tensor_that_is_not_converted_shows(name, made, tmp_path, monkeypatch):
    one, _ = made(name)
    monkeypatch.setitem(globals(), "converted", lambda _a, _c, _n, values: values)
    other = tmp_path / "other.gguf"
    write(other, FORMS[name][0], open_model(one.path).checkpoint)
    runner = families.load(open_model(other), families.reference(), "float64")
    found = families.logits(runner, one.ids)
    assert families.distance(found, one.logits) > 10 * BOUND


def rewritten(made, name, tmp_path, change):
    one, _ = made(name)
    path = tmp_path / "changed.gguf"
    write(path, FORMS[name][0], open_model(one.path).checkpoint, change=change)
    return path


@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_that_does_not_fit_is_named(name, made, tmp_path):
    gone, cut = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"

    def change(tensors):
        kept = {key: values for key, values in tensors.items() if key != gone}
        return {**kept, cut: kept[cut][:5], "surplus.weight": kept[cut]}

    path = rewritten(made, name, tmp_path, change)
    with pytest.raises(WeightMismatch) as caught:
        open_model(path)
    message = str(caught.value)
    for part in (str(path), f"missing {gone} [48, 80]", "unused surplus.weight"):
        assert part in message
    assert f"{cut} has shape [5], expected [48]" in message


def test_a_fused_tensor_of_another_size_is_named(made, tmp_path):
    name = "model.layers.0.self_attn.qkv_proj.weight"

    def change(tensors):
        return {**tensors, name: tensors[name][:-8]}

    with pytest.raises(WeightMismatch, match=r"qkv_proj.weight has shape \[72, 48\]"):
        open_model(rewritten(made, "phi3", tmp_path, change))


def test_long_rope_of_another_size_is_named(made, tmp_path):
    def change(tensors):
        return {**tensors, "rope_factors_short.weight": np.ones(5, np.float32)}

    with pytest.raises(CheckpointError, match=r"\[5\]; accepted: float32 \[4\]"):
        open_model(rewritten(made, "phi3", tmp_path, change))


def test_olmo3_is_not_read_as_olmo2(made, tmp_path, monkeypatch):
    monkeypatch.setitem(
        globals(), "write_rope", lambda writer, *_: writer.add_sliding_window(7)
    )
    with pytest.raises(CheckpointError, match=r"sliding_window: found 7"):
        open_model(rewritten(made, "olmo2", tmp_path, lambda tensors: tensors))
