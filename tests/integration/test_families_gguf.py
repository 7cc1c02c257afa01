"""The GGUF form of every family, against transformers and the safetensors form.

Files are written by the ``gguf`` package under the names of its own tensor map, with
the keys and the conventions of llama.cpp's converter.
"""

from __future__ import annotations

import importlib
import re

import gguf
import numpy as np
import pytest

from depth import mostly_full
from inl import EngineConfig
from inl.errors import CheckpointError, WeightMismatch
from inl.executor.model_loader import open_model
from inl.speculation.draft_head import find_head

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
families = importlib.import_module("families")

BOUND = 1e-4
EXPERTS = re.compile(r"\.experts\.\w+\.weight$")
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


def write(
    path,
    architecture,
    source,
    *,
    change=lambda tensors: tensors,
    blocks=None,
    drafting=0,
):
    """Write a checkpoint's config and tensors as llama.cpp's converter would.

    blocks: type of the matrices of experts. drafting: layers after the last one.
    """
    config = source.config
    writer = gguf.GGUFWriter(path, architecture)
    layers = config["num_hidden_layers"] + drafting
    writer.add_block_count(layers)
    if drafting:
        writer.add_nextn_predict_layers(drafting)
    (write_sizes_by_kind if architecture == "gemma4" else write_sizes)(
        writer, config, architecture
    )
    write_rope(writer, config, architecture)
    letters = [f"<{index}>" for index in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    known = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], layers)
    tensors = {name: source.tensor(name).data for name in source.names()}
    whole = architecture == "gemma4"
    if architecture == "apertus":
        write_activations(writer, layers, source.path)
        tensors = {name: each for name, each in tensors.items() if "act_fn" not in name}
    for name, values in change(tensors if whole else stacked(tensors)).items():
        if whole and (stored := of_gemma4(name)):
            writer.add_tensor(stored, values)
            continue
        usual = name.replace("e_score_correction_bias", "e_score_correction.bias")
        usual += ".weight" if name.endswith(".sinks") else ""
        stored = names.get_name(usual, (".weight", ".bias")) or name
        values = converted(architecture, config, name, values)
        if EXPERTS.search(name) and blocks is not None:
            writer.add_tensor(stored, gguf.quants.quantize(values, blocks),
                              raw_dtype=blocks)  # fmt: skip
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_gemma4(name):
    """Names that the converter of Gemma 4 writes itself, else ``None``."""
    parts = {
        "router.scale": "ffn_gate_inp.scale",
        "layer_scalar": "layer_output_scale.weight",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }  # fmt: skip
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{parts[part]}" if part in parts else None


def write_activations(writer, layers, folder):
    """Parameters of xIELU as they are stored, in metadata."""
    stored = safetensors.load_file(folder / "model.safetensors")
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        names = [f"model.layers.{n}.mlp.act_fn.{part}" for n in range(layers)]
        values = [float(stored[name].reshape(-1)[0]) for name in names]
        getattr(writer, f"add_xielu_{part}")(values)


def stacked(tensors):
    """The matrices of all experts of a layer as one tensor for each kind."""
    found, experts = {}, {}
    for name, values in tensors.items():
        if numbered := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            stem, _, kind = numbered.groups()
            experts.setdefault(f"{stem}.{kind}", []).append((int(numbered[2]), values))
        elif name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for kind, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
                found[f"{stem}{kind}_proj.weight"] = half
        else:
            whole = name.endswith(".experts.down_proj")
            found[f"{name}.weight" if whole else name] = values
    for name, each in experts.items():
        found[name] = np.stack([values for _, values in sorted(each, key=order)])
    return found


def order(pair):
    return pair[0]


def write_sizes(writer, config, architecture):
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
    if architecture in ("exaone4", "exaone-moe", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture in ("exaone4", "exaone-moe"):
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(pattern)
    count = config.get("num_experts") or config.get("n_routed_experts")
    if count := count or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        writer.add_expert_feed_forward_length(inner)
    if architecture in ("glm4moe", "dots1", "minimax-m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture in ("glm4moe", "dots1", "exaone-moe"):
        shared = config.get("n_shared_experts") or config["num_shared_experts"]
        writer.add_expert_shared_count(shared)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)


def write_sizes_by_kind(writer, config, _architecture):
    """Of Gemma 4, whose layers with a window have other heads."""
    full = config.get("per_layer_config") or {}
    full = {
        "head_dim": config.get("global_head_dim"),
        "num_key_value_heads": config.get("num_global_key_value_heads"),
        **next(iter(full.values()), {}),
    }
    full["num_key_value_heads"] = (
        full["num_key_value_heads"] or config["num_key_value_heads"]
    )
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    inner = config["intermediate_size"]
    wide = 2 * inner if config["use_double_wide_mlp"] else inner
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(
        [inner if index < layers - shared else wide for index in range(layers)]
    )
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([
        config["num_key_value_heads"] if each else full["num_key_value_heads"]
        for each in local
    ])  # fmt: skip
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(local)
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    turning = (
        int(full["head_dim"] * rope["full_attention"]["partial_rotary_factor"]) // 2
    )
    still = full["head_dim"] // 2 - turning
    factors = np.float32([1.0] * turning + [1e30] * still)
    writer.add_tensor("rope_freqs.weight", factors)


def write_rope(writer, config, architecture):
    if architecture == "gemma4":
        return
    rope = config["rope_parameters"]
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    heads = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    theta = rope["rope_theta"]
    if architecture == "hunyuan-dense":
        theta *= rope["alpha"] ** (heads / (heads - 2))
    if architecture != "gemma2":  # whose converter trusts the default
        writer.add_rope_freq_base(theta)
    if architecture in ("glm4moe", "minimax-m2"):
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * heads))
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(share * heads))
        size = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(size)
    if architecture in ("llama", "arcee"):
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
    shifted = architecture in ("gemma", "gemma2", "gemma3")
    if shifted and name.endswith("norm.weight"):
        return values + np.float32(1)
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if architecture in ("llama", "arcee", "mistral3") and part in counts:
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


CONVERTED = ["gemma2", "gemma3", "llama-linear", "arcee", "gemma", "ministral3"]


@pytest.mark.parametrize("name", mostly_full(CONVERTED, 3))
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


def test_experts_of_gpt_oss_in_mxfp4(tmp_path):
    """The experts stay in blocks; transformers has their decoded numbers."""
    one = families.make("gpt-oss", tmp_path, hidden_size=64, intermediate_size=32,
                        **FORMS["gpt-oss"][1])  # fmt: skip
    path, kind = tmp_path / "blocks.gguf", gguf.GGMLQuantizationType.MXFP4
    write(path, "gpt-oss", open_model(one.path).checkpoint, blocks=kind)
    model = transformers.GptOssForCausalLM.from_pretrained(
        one.path, attn_implementation="eager"
    ).eval()
    decoded = {
        name: torch.tensor(gguf.quants.dequantize(each.data, each.tensor_type).copy())
        for each in gguf.GGUFReader(path).tensors
        for name in (each.name,)
        if "_exps.weight" in name
    }
    assert len(decoded) == 3 * families.LAYERS
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            gate, up, down = (
                decoded[f"blk.{index}.ffn_{part}_exps.weight"].transpose(1, 2)
                for part in ("gate", "up", "down")
            )
            layer.mlp.experts.gate_up_proj.copy_(torch.stack([gate, up], -1).flatten(2))
            layer.mlp.experts.down_proj.copy_(down)
        expected = model(torch.tensor([one.ids])).logits[0].numpy()
    language = open_model(path)
    name = "model.layers.0.mlp.experts.up_proj.weight"
    assert language.checkpoint.spec(name) == ("mxfp4", (5, 32, 64))
    runner = families.load(language, families.reference(), "float64")
    assert families.distance(families.logits(runner, one.ids), expected) < BOUND
    assert families.distance(expected, one.logits) > 10 * BOUND


def test_a_layer_that_predicts_further_tokens_is_read(tmp_path):
    one = families.make("glm4-moe", tmp_path)
    last, extra = (f"model.layers.{families.LAYERS - far}." for far in (1, 0))

    def change(tensors):
        found = {
            extra + name.removeprefix(last): values + np.float32(1)
            for name, values in tensors.items()
            if name.startswith(last)
        }
        size = families.SIZES["hidden_size"]
        for name in ("enorm", "hnorm", "shared_head.norm"):
            found[f"{extra}{name}.weight"] = np.full(size, len(name), np.float32)
        found[f"{extra}eh_proj.weight"] = np.ones((size, 2 * size), np.float32)
        return tensors | found

    path, source = tmp_path / "drafting.gguf", open_model(one.path).checkpoint
    write(path, "glm4moe", source, change=change, drafting=1)
    language = open_model(path)
    assert language.config.layers == families.LAYERS
    head = find_head(language, EngineConfig(speculation="mtp"))
    expected = source.tensor(f"{last}self_attn.o_proj.weight").data + 1
    found = head.checkpoint.tensor("model.layers.0.self_attn.o_proj.weight").data
    assert np.array_equal(found, expected)
    assert head.checkpoint.tensor("model.norm.weight").data[0] == 16
    assert head.checkpoint.tensor("hidden_norm.weight").data[0] == 5


@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_that_does_not_fit_is_named(name, made, tmp_path):
    gone, cut = "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"

    def change(tensors):
        kept = {key: values for key, values in tensors.items() if key != gone}
        return {**kept, cut: kept[cut][:5], "surplus.weight": kept[cut]}

    path = rewritten(made, name, tmp_path, change)
    with pytest.raises(WeightMismatch) as caught:
        open_model(path)
    message = str(caught.value)
    for part in (str(path), f"missing {gone} [48, ", "unused surplus.weight"):
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
