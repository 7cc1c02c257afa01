"""GGUF files of a model of images and text, written as llama.cpp's converter does.

Names are those of the reference package's maps; what its converter changes in tensors
is here: rows of q and k, offsets of norms, frames of patches and parts of "qkv".
"""

from __future__ import annotations

import gguf
import numpy as np

MEAN = {
    "clip": [0.48145466, 0.4578275, 0.40821073],
    "half": [0.5, 0.5, 0.5],
    "none": [0.0, 0.0, 0.0],
}
STD = {
    "clip": [0.26862954, 0.26130258, 0.27577711],
    "half": [0.5, 0.5, 0.5],
    "none": [1.0, 1.0, 1.0],
}
TEXTS = {
    "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "gemma3": "gemma3",
    "mistral3": "llama", "smolvlm": "llama", "gemma4": "gemma4",
    "paddleocr_vl": "paddleocr",
}  # fmt: skip
PROJECTORS = {
    "qwen2_5_vl": "QWEN25VL", "qwen3_vl": "QWEN3VL", "gemma3": "GEMMA3",
    "mistral3": "PIXTRAL", "smolvlm": "IDEFICS3", "gemma4": "GEMMA4V",
    "paddleocr_vl": "PADDLEOCR",
}  # fmt: skip
MERGERS = {
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}  # fmt: skip
"""Names that the converter has, and not the map."""


BOUNDS = (".input_max", ".input_min", ".output_max", ".output_min")


def gguf_tokens(special, count=0):
    """A vocabulary of 256 bytes, then special tokens, and others up to a count."""
    tokens = [*(f"<{at}>" for at in range(256)), *special]
    return [*tokens, *(f"<unused{at}>" for at in range(count - len(tokens)))]


def permuted(rows, heads):
    """Rows of q or k for a rotation of adjacent pairs."""
    shape = rows.shape
    pairs = rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return pairs.swapaxes(1, 2).reshape(shape)


def _numbers(made):
    return {
        name.removeprefix("model."): tensor.detach().float().numpy()
        for name, tensor in made.state_dict().items()
    }


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_text(made, path, tokens):
    """Write the language model of a model of transformers."""
    kind, text = made.config.model_type, made.config.text_config
    arch = TEXTS[kind]
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    rope = text.rope_parameters
    if arch != "gemma4":
        writer.add_head_count_kv(text.num_key_value_heads)
        writer.add_key_length(16)
        writer.add_value_length(16)
    if arch == "gemma4":
        _write_gemma4(writer, text)
    elif arch == "gemma3":
        writer.add_sliding_window(text.sliding_window)
        writer.add_sliding_window_pattern(
            [each == "sliding_attention" for each in text.layer_types]
        )
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if arch == "qwen3vl":
        taps = made.config.vision_config.deepstack_visual_indexes
        writer.add_num_deepstack_layers(len(taps))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    if arch == "gemma4":
        writer.add_pad_token_id(text.pad_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers)
    for name, values in _numbers(made).items():
        for prefix in ("language_model.", "text_model."):
            if name.startswith(prefix):
                own = f"model.{name.removeprefix(prefix)}"
                break
        else:
            if name != "lm_head.weight":
                continue
            own = name
        if arch == "llama" and own.endswith("q_proj.weight"):
            values = permuted(values, heads)
        if arch == "llama" and own.endswith("k_proj.weight"):
            values = permuted(values, text.num_key_value_heads)
        if arch == "gemma3" and own.endswith("norm.weight"):
            values = values + 1
        if own.endswith(".layer_scalar"):
            layer = own.removeprefix("model.layers.").partition(".")[0]
            found = f"blk.{layer}.layer_output_scale.weight"
        else:
            found = names.get_name(own, (".weight", ".bias"))
        assert found is not None, own
        writer.add_tensor(found, np.ascontiguousarray(values))
    _finish(writer)


def _write_gemma4(writer, text):
    """Sizes of layers with a window, and of the others."""
    fields = text.to_dict()
    full = (
        fields["global_head_dim"]
        if "global_head_dim" in fields
        else next(iter(fields["per_layer_config"].values()))["head_dim"]
    )
    local = [kind == "sliding_attention" for kind in text.layer_types]
    writer.add_head_count_kv([fields["num_key_value_heads"]] * len(local))
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(fields["head_dim"])
    writer.add_value_length_swa(fields["head_dim"])
    writer.add_shared_kv_layers(text.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(text.hidden_size_per_layer_input)
    writer.add_sliding_window(text.sliding_window)
    writer.add_sliding_window_pattern(local)
    if text.final_logit_softcapping:
        writer.add_final_logit_softcapping(text.final_logit_softcapping)
    rope = text.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    turning = int(full * rope["full_attention"]["partial_rotary_factor"]) // 2
    factors = np.float32([1.0] * turning + [1e30] * (full // 2 - turning))
    writer.add_tensor("rope_freqs.weight", factors)


def write_projector(made, path, *, dtype=np.float32):
    """Write the vision encoder of a model of transformers.

    dtype: of matrices. Returns the names of the tensors in the file.
    """
    kind, vision = made.config.model_type, made.config.vision_config
    is_qwen = kind.startswith("qwen")
    layers = vision.depth if is_qwen else vision.num_hidden_layers
    heads = vision.num_heads if is_qwen else vision.num_attention_heads
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    projector = getattr(gguf.VisionProjectorType, PROJECTORS[kind])
    writer.add_clip_projector_type(projector)
    writer.add_vision_projection_dim(made.config.text_config.hidden_size)
    side = 560 if is_qwen else getattr(vision, "image_size", 224)
    writer.add_vision_image_size(side)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(heads)
    look = "clip" if kind in ("qwen2_5_vl", "mistral3", "paddleocr_vl") else "half"
    look = "none" if kind == "gemma4" else look
    writer.add_vision_image_mean(MEAN[look])
    writer.add_vision_image_std(STD[look])
    taps = []
    if kind == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_attention_layernorm_eps(1e-6)
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
        writer.add_vision_min_pixels(3136)
        writer.add_vision_max_pixels(50176)
    elif kind == "qwen3_vl":
        taps = vision.deepstack_visual_indexes
        writer.add_vision_use_gelu(True)
        writer.add_vision_attention_layernorm_eps(1e-6)
        writer.add_vision_spatial_merge_size(2)
        writer.add_vision_is_deepstack_layers([at in taps for at in range(layers)])
        writer.add_vision_min_pixels(4096)
        writer.add_vision_max_pixels(65536)
    elif kind == "mistral3":
        if vision.hidden_act == "silu":
            writer.add_vision_use_silu(True)
        else:
            writer.add_vision_use_gelu(True)
        writer.add_vision_attention_layernorm_eps(1e-5)
        writer.add_vision_spatial_merge_size(made.config.spatial_merge_size)
    elif kind == "gemma4":
        writer.add_vision_attention_layernorm_eps(vision.rms_norm_eps)
    elif kind == "paddleocr_vl":
        writer.add_vision_use_gelu(True)
        writer.add_vision_attention_layernorm_eps(1e-6)
        writer.add_vision_min_pixels(56 * 56)
        writer.add_vision_max_pixels(140 * 140)
    else:
        writer.add_vision_use_gelu(True)
        writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
        scale = 2
        writer.add_vision_projector_scale_factor(scale)
    if kind == "smolvlm":
        writer.add_vision_preproc_image_size(150)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 3))
    written = []

    def add(name, values):
        values = np.ascontiguousarray(values)
        is_matrix = values.ndim > 1
        writer.add_tensor(name, values.astype(dtype) if is_matrix else values)
        written.append(name)

    for name, values in _numbers(made).items():
        if name.startswith(("language_model.", "text_model.", "lm_head.")):
            continue
        if "vision_tower.head." in name or "vision_model.head." in name:
            continue
        if "packing_position_embedding" in name:
            continue
        for own, changed in _converted(kind, name, values, heads):
            add(_gguf_name(own, names, taps), changed)
    if kind == "mistral3":
        add("v.token_embd.img_break", np.zeros(64, np.float32))
    _finish(writer)
    return written


def _gguf_name(name, names, taps):
    stem, _, kind = name.rpartition(".")
    if kind.isdigit():  # of the next frame
        return names.get_name(stem, (".weight",)) + f".{kind}"
    short = stem.removeprefix("visual.")
    if short in MERGERS:
        return f"{MERGERS[short]}.{kind}"
    if short.startswith("deepstack_merger_list."):
        _, index, module = short.split(".")
        module = module.removeprefix("linear_")
        return f"v.deepstack.{taps[int(index)]}.{module}.{kind}"
    found = names.get_name(name, (".weight", ".bias", *BOUNDS))
    assert found is not None, name
    return found


def _of_gemma4(name, values):
    name = f"model.{name}".replace("model.vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("patch_embedder.input_proj.weight"):
        size = int((values.shape[1] // 3) ** 0.5)
        values = values.reshape(len(values), size, size, 3).transpose(0, 3, 1, 2)
    return name, values


def _converted(kind, name, values, heads):
    """What the converter makes of a tensor: names and values."""
    if kind == "gemma3" and "vision_model." not in name:
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    if name.endswith("patch_embed.proj.weight"):
        yield name, values[:, :, 0]
        yield f"{name}.1", values[:, :, 1]
    elif kind == "qwen2_5_vl" and ".qkv." in name:
        for part, rows in zip("qkv", np.split(values, 3), strict=True):
            yield name.replace("qkv", part), rows
    elif kind == "mistral3" and name.endswith(("q_proj.weight", "k_proj.weight")):
        yield name, permuted(values, heads)
    elif name.endswith("soft_emb_norm.weight"):
        yield name, values + 1
    elif name.endswith("mm_input_projection_weight"):
        yield name.replace("_weight", ".weight"), values
    elif kind == "smolvlm":
        yield f"model.{name}", values
    elif kind == "paddleocr_vl":
        own = name.replace("visual.", "model.").replace("projector.", "mlp_AR.")
        yield own, values
    elif kind == "gemma4":
        yield _of_gemma4(name, np.atleast_1d(values))
    else:
        yield name, values
