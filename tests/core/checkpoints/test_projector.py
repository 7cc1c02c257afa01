"""Vision encoders in GGUF files: what is refused, and what is passed over."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl import EngineConfig
from inl.checkpoints.gguf.checkpoint import GgufCheckpoint
from inl.checkpoints.gguf.projector import ProjectorCheckpoint
from inl.errors import CheckpointError
from inl.executor.load_plan import configure
from inl.executor.model_loader import open_model

HIDDEN, WIDE, INNER, SIDE = 32, 48, 80, 4
TOKENS = ["<s>", "</s>", "<image>", *"abcdefghijklm"]
LAYER = {
    "attn_q": (WIDE, WIDE), "attn_k": (WIDE, WIDE), "attn_v": (WIDE, WIDE),
    "attn_out": (WIDE, WIDE), "ln1": (WIDE,), "ln2": (WIDE,),
    "ffn_up": (INNER, WIDE), "ffn_down": (WIDE, INNER),
}  # fmt: skip


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_text(path, tokens=TOKENS):
    """A Llama of one layer."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,),
        "output": (len(tokens), HIDDEN), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_gate": (16, HIDDEN),
        "blk.0.ffn_up": (16, HIDDEN), "blk.0.ffn_down": (HIDDEN, 16),
    }  # fmt: skip
    shapes |= {
        f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")
    }
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)
    finish(writer)
    return path


def tensors_of_encoder():
    rng = np.random.default_rng(2)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    found = {
        "v.patch_embd.weight": draw(WIDE, 3, 14, 14), "v.patch_embd.bias": draw(WIDE),
        "v.position_embd.weight": draw(SIDE**2, WIDE), "v.post_ln.weight": draw(WIDE),
        "v.post_ln.bias": draw(WIDE), "mm.model.fc.weight": draw(HIDDEN, 4 * WIDE),
    }  # fmt: skip
    for name, shape in LAYER.items():
        found[f"v.blk.0.{name}.weight"] = draw(*shape)
        found[f"v.blk.0.{name}.bias"] = draw(shape[0])
    return found


def write_encoder(
    path, tensors=None, *, projector="idefics3", width=HIDDEN, architecture="clip"
):
    """A vision encoder of Idefics3 of one layer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector)
    writer.add_vision_projection_dim(width)
    writer.add_vision_image_size(14 * SIDE)
    writer.add_vision_patch_size(14)
    writer.add_vision_embedding_length(WIDE)
    writer.add_vision_feed_forward_length(INNER)
    writer.add_vision_block_count(1)
    writer.add_vision_head_count(2)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(True)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_projector_scale_factor(2)
    tensors = tensors_of_encoder() if tensors is None else tensors
    for name, values in tensors.items():
        if isinstance(values, tuple):
            data, kind = values
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    finish(writer)
    return path


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.gguf")


def test_a_file_beside_the_model_is_found(text, tmp_path):
    write_encoder(tmp_path / "mmproj-model-f16.gguf")
    language = open_model(text)
    assert language.vision is not None
    assert language.vision.placeholder == 2
    assert language.vision.settings.longest == 4 * 14 * SIDE


def test_files_of_other_models_are_passed_over(text, tmp_path):
    """A folder may have files of several models."""
    write_encoder(tmp_path / "mmproj-a.gguf", width=64)
    write_encoder(tmp_path / "mmproj-b.gguf", projector="resampler")
    (tmp_path / "mmproj-c.gguf").write_bytes(b"GGUF damaged")
    assert open_model(text).vision is None
    write_encoder(tmp_path / "mmproj-d.gguf")
    found = open_model(text).vision
    assert found.checkpoint.path.name == "mmproj-d.gguf"


def test_a_named_file_is_used_or_refused(text, tmp_path):
    named = write_encoder(tmp_path / "encoder.gguf")
    language = open_model(text)
    assert language.vision is None
    with_vision = configure(language, EngineConfig(mmproj=str(named)))
    assert with_vision.vision.checkpoint.path == named
    with pytest.raises(CheckpointError, match=r"none.gguf: no such file|none.gguf"):
        configure(language, EngineConfig(mmproj=str(tmp_path / "none.gguf")))
    with pytest.raises(CheckpointError, match="accepted: 'clip', a vision encoder"):
        configure(language, EngineConfig(mmproj=str(text)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 64}, "found features of 64 numbers .* which is of kind llama with"),
        ({"projector": "gemma3"}, "for a model of kind gemma3_text"),
        ({"projector": "ldp"}, "found 'ldp'; accepted: qwen2.5vl_merger"),
        ({"architecture": "none"}, "accepted: 'clip', a vision encoder"),
    ],
)
def test_encoders_of_other_kinds_are_refused(text, tmp_path, given, message):
    path = write_encoder(tmp_path / "encoder.gguf", **given)
    with pytest.raises(CheckpointError, match=message):
        ProjectorCheckpoint(path, GgufCheckpoint(text))


def test_a_model_without_the_token_of_images_is_refused(tmp_path):
    text = write_text(tmp_path / "text.gguf", ["<s>", "</s>", *"abcdefghijklmn"])
    path = write_encoder(tmp_path / "encoder.gguf")
    with pytest.raises(CheckpointError, match="found no <image>, the place of"):
        ProjectorCheckpoint(path, GgufCheckpoint(text))


def test_tensors_that_are_not_known_are_refused(text, tmp_path):
    tensors = tensors_of_encoder() | {"v.blk.0.ls1.weight": np.ones(WIDE, np.float32)}
    path = write_encoder(tmp_path / "encoder.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"v\.blk\.0\.ls1\.weight': not known"):
        ProjectorCheckpoint(path, GgufCheckpoint(text))


def test_tensors_of_audio_are_passed_over(text, tmp_path):
    """As in published files of Gemma 4."""
    audio = {"a.blk.0.attn_q.weight": np.ones((4, 4), np.float32),
             "mm.a.input_projection.weight": np.ones((4, 4), np.float32)}  # fmt: skip
    path = write_encoder(tmp_path / "encoder.gguf", tensors_of_encoder() | audio)
    names = ProjectorCheckpoint(path, GgufCheckpoint(text)).names()
    assert len(names) == len(tensors_of_encoder())


def test_names_of_feed_forward_layers_may_be_each_others(text, tmp_path):
    """As in old files."""
    tensors = tensors_of_encoder()
    swapped = dict(tensors)
    for kind in ("weight", "bias"):
        up, down = (f"v.blk.0.{name}.{kind}" for name in ("ffn_up", "ffn_down"))
        swapped[up], swapped[down] = tensors[down], tensors[up]
    path = write_encoder(tmp_path / "encoder.gguf", swapped)
    found = ProjectorCheckpoint(path, GgufCheckpoint(text))
    at = "model.vision_model.encoder.layers.0.mlp."
    first = found.tensor(f"{at}fc1.weight").data
    np.testing.assert_array_equal(first, tensors["v.blk.0.ffn_up.weight"])
    assert found.spec(f"{at}fc2.bias")[1] == (WIDE,)


def test_matrices_may_be_quantized(text, tmp_path):
    tensors = tensors_of_encoder()
    name, kind = "mm.model.fc.weight", gguf.GGMLQuantizationType.Q8_0
    values = tensors[name]
    tensors[name] = (gguf.quants.quantize(values, kind), kind)
    path = write_encoder(tmp_path / "encoder.gguf", tensors)
    found = ProjectorCheckpoint(path, GgufCheckpoint(text))
    own = "model.connector.modality_projection.proj.weight"
    assert found.spec(own) == ("q8_0", (HIDDEN, 4 * WIDE))


def test_numbers_are_checked(text, tmp_path):
    path = write_encoder(tmp_path / "encoder.gguf")
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields["clip.vision.projector.scale_factor"]
    field.parts[field.data[0]][0] = 0
    reader.data.flush()
    with pytest.raises(CheckpointError, match=r"scale_factor: found 0; accepted: an"):
        ProjectorCheckpoint(path, GgufCheckpoint(text))
