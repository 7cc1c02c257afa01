from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.gguf.file import GgufFile
from inl.checkpoints.gguf.names import hf_name
from inl.checkpoints.gguf.types import KINDS
from inl.errors import CheckpointError
from inl.text.strings import Strings


@pytest.mark.full
def test_metadata_equals_the_reference_package(default_checkpoint):
    found = GgufFile(Path(default_checkpoint.path))
    fields = gguf.GGUFReader(default_checkpoint.path).fields
    expected = {
        key: field.contents()
        for key, field in fields.items()
        if not key.startswith("GGUF.")
    }
    assert list(found.metadata) == list(expected)
    for key, value in found.metadata.items():
        assert (value.tolist() if hasattr(value, "tolist") else value) == expected[key]
    found.file.close()


def test_tensors_equal_the_reference_package(default_checkpoint):
    found = GgufFile(Path(default_checkpoint.path))
    reader = gguf.GGUFReader(default_checkpoint.path)
    assert set(found.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        entry = found.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.start == tensor.data_offset
        assert entry.stop - entry.start == tensor.n_bytes
    found.file.close()


def test_a_large_vocabulary_stays_in_the_file(default_checkpoint):
    found = GgufFile(Path(default_checkpoint.path))
    for name in ("tokens", "merges"):
        texts = found.metadata[f"tokenizer.ggml.{name}"]
        assert isinstance(texts, Strings)
        assert len(texts) > 40_000
    found.file.close()


def test_dtypes_match_the_reference_package():
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}
    names |= {f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
    for number, name in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number).name.lower()
        assert names.get(theirs, theirs) == name


def test_names_match_the_reference_package(tensors):
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name in [*tensors, "lm_head.weight"]:
        assert hf_name(theirs.get_name(name, (".weight",))) == name


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.01.attn_q.weight", "x", ""])
def test_unknown_names_are_unchanged(name):
    assert hf_name(name) == name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_tensors_have_hugging_face_names_and_row_order(
    kind, tensors, gguf_writer, tmp_path
):
    packed = gguf.GGMLQuantizationType[kind]
    path = gguf_writer(tmp_path / "m.gguf", tensors, kind=packed)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(tensors)
    for name, values in tensors.items():
        used = packed if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        # Rows are packed one by one, so packing and ordering rows commute.
        expected = gguf.dequantize(gguf.quantize(values, used), used)
        dtype, shape = checkpoint.spec(name)
        array = checkpoint.tensor(name)
        assert (array.dtype, array.shape) == (dtype, shape)
        assert np.array_equal(dequantize(array, name), expected.reshape(values.shape))
    checkpoint.close()


def test_config_matches_hugging_face(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    assert checkpoint.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": pytest.approx(1e-5),
        "vocab_size": 127,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": [1],
    }
    assert checkpoint.eos_token_ids == (1,)


def written(path, architecture, values, alignment):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_custom_alignment(alignment)
    writer.add_tensor("blk.0.attn_q.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unknown_architecture_keeps_its_own_names(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    checkpoint = open_checkpoint(written(tmp_path / "m.gguf", "mamba", values, 32))
    assert checkpoint.config["model_type"] == "mamba"
    assert checkpoint.config["architectures"] == []
    assert checkpoint.names() == ["blk.0.attn_q.weight"]
    assert checkpoint.eos_token_ids == ()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_versions_and_alignments(version, alignment, tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = written(tmp_path / "m.gguf", "x", values, alignment)
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + version.to_bytes(4, "little") + raw[8:])
    found = open_checkpoint(path).tensor("blk.0.attn_q.weight")
    assert np.array_equal(found.data, values)


def test_a_tensor_is_read_once(default_checkpoint):
    tracemalloc.start()
    array = default_checkpoint.tensor("model.embed_tokens.weight")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.data.nbytes > 30_000_000
    assert peak < array.data.nbytes + 100_000
    assert not array.data.flags.writeable


def test_arrays_outlive_the_checkpoint(tiny_gguf, tensors):
    checkpoint = open_checkpoint(tiny_gguf)
    array = checkpoint.tensor("model.embed_tokens.weight")
    checkpoint.close()
    checkpoint.close()
    assert np.array_equal(array.data, tensors["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.tensor("model.embed_tokens.weight")
