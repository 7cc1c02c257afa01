"""Folders of safetensors: layout of compressed-tensors, errors, and what is copied."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from inl.checkpoints.blocks.dtypes import dequantize
from inl.convert.gguf_source import GgufSource, SourceTensor, source_of_model
from inl.convert.write_folder import write_folder
from inl.convert.write_gguf import write_gguf
from inl.dtypes import wrap
from inl.errors import CheckpointError, RequestError
from inl.executor.model_loader import open_model
from inl.testing.tiny import tiny_llama
from quantized_blocks import e4m3_values

MATRIX = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama whose rows are whole groups, but for those of one matrix."""
    path = tmp_path_factory.mktemp("made") / "tiny"
    path.mkdir()
    config, tensors = tiny_llama(np.random.default_rng(3), hidden=64, inner=96)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    (path / "notes.txt").write_text("kept")
    (path / "old.bin").write_bytes(b"not copied")
    return path


def stored(path):
    """Tensors of a file as the safetensors package reads them; E4M3 by its bytes."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    kinds = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1"}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (8 + size + each for each in entry["data_offsets"])
            values = np.frombuffer(data[start:stop], kinds[entry["dtype"]])
            found[name] = values.reshape(entry["shape"])
    return found


def decoded(tensors, module, kind):
    """A matrix in float64, by the definition of compressed-tensors."""
    scale = tensors[f"{module}.weight_scale"].astype(np.float64)
    if kind == "fp8":
        return e4m3_values()[tensors[f"{module}.weight"]] * scale
    bits = int(kind[3:])
    rows, columns = tensors[f"{module}.weight_shape"]
    words = tensors[f"{module}.weight_packed"].view(np.uint32)
    codes = [words >> shift & (2**bits - 1) for shift in range(0, 32, bits)]
    codes = np.stack(codes, -1).reshape(rows, columns).astype(np.int64)
    return (codes - 2 ** (bits - 1)) * scale.repeat(32, 1)


@pytest.mark.parametrize(
    ("kind", "bound"), [("fp8", 0.04), ("int8", 0.008), ("int4", 0.11)]
)
def test_matrices_of_the_layers_are_quantized(folder, tmp_path, kind, bound):
    target = tmp_path / kind
    language = open_model(folder)
    written = write_folder(language, target, kind=kind)
    found = stored(target / "model.safetensors")
    with safe_open(target / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(found)
    layers = {each.name: each.error for each in written.quantization.layers}
    assert len(layers) == 7 * language.config.layers
    reread = open_model(target)
    for name, measured in layers.items():
        module = name.removesuffix(".weight")
        original = dequantize(language.checkpoint.tensor(name)).astype(np.float64)
        exact = decoded(found, module, kind)
        error = np.linalg.norm(exact - original) / np.linalg.norm(original)
        assert error == pytest.approx(measured, rel=1e-4)
        assert 0 < error < bound
        ours = dequantize(reread.checkpoint.tensor(name))
        np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=1e-9)
    kept = "model.embed_tokens.weight"
    assert np.array_equal(found[kept], language.checkpoint.tensor(kept).data)
    dtypes = {reread.checkpoint.spec(name)[0] for name in layers}
    assert dtypes == {{"fp8": "float32", "int8": "q8_0", "int4": "q4_0"}[kind]}


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_codes_are_the_nearest_of_their_scale(folder, tmp_path, kind):
    language = open_model(folder)
    write_folder(language, tmp_path / "m", kind=kind)
    found = stored(tmp_path / "m" / "model.safetensors")
    original = language.checkpoint.tensor(f"{MATRIX}.weight").data.astype(np.float64)
    scale = found[f"{MATRIX}.weight_scale"].astype(np.float64)
    if kind == "fp8":
        values = e4m3_values()
        grid = np.sort(values[np.isfinite(values)])
        scale = np.broadcast_to(scale, original.shape)
    else:
        half = 2 ** (int(kind[3:]) - 1)
        grid, scale = np.arange(-half, half), scale.repeat(32, 1)
    nearest = np.abs(original[..., None] - grid * scale[..., None]).min(-1)
    change = np.abs(decoded(found, MATRIX, kind) - original)
    assert (change <= nearest + 1e-5 * np.abs(original) + 1e-12).all()


def test_the_config_names_what_stays(folder, tmp_path):
    write_folder(open_model(folder), tmp_path / "m", kind="int4")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    scheme = config["quantization_config"]
    assert scheme["quant_method"] == "compressed-tensors"
    assert scheme["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert scheme["ignore"] == ["lm_head"]
    names = sorted(each.name for each in (tmp_path / "m").iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]


def test_matrices_without_whole_groups_stay_and_are_ignored(tmp_path):
    config, tensors = tiny_llama(np.random.default_rng(3))  # rows of 48
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    target = tmp_path / "out"
    written = write_folder(open_model(tmp_path), target, kind="int8")
    quantized = {each.name for each in written.quantization.layers}
    fields = json.loads((target / "config.json").read_text())["quantization_config"]
    shapes = {name: each.shape for name, each in tensors.items() if "layers" in name}
    whole = {n for n, shape in shapes.items() if len(shape) == 2 and not shape[1] % 32}
    assert quantized == whole
    assert "model.layers.0.self_attn.q_proj" in fields["ignore"]
    found = stored(target / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(found[name], tensors[name])
    open_model(target)


def test_a_quantized_model_is_not_quantized_again_but_decoded(folder, tmp_path):
    write_folder(open_model(folder), tmp_path / "int8", kind="int8")
    language = open_model(tmp_path / "int8")
    with pytest.raises(RequestError, match="is quantized already: compressed-tensors"):
        write_folder(language, tmp_path / "again", kind="int4")
    write_folder(language, tmp_path / "float", dtype="float32")
    found = stored(tmp_path / "float" / "model.safetensors")[f"{MATRIX}.weight"]
    expected = decoded(stored(tmp_path / "int8" / "model.safetensors"), MATRIX, "int8")
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    path = tmp_path / "m.gguf"
    write_gguf(source_of_model(language), path, None, requantize=True)
    blocks = open_model(path).checkpoint.tensor(f"{MATRIX}.weight")
    np.testing.assert_allclose(dequantize(blocks), expected, rtol=1e-6)


def test_a_model_of_images_is_refused(folder, tmp_path):
    language = open_model(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"text_config": {}}
    language.checkpoint.path = tmp_path
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="found a model of images and text"):
        write_folder(language, tmp_path / "out")


def test_memory_is_that_of_one_tensor(tmp_path):
    """Of 24 tensors of 4 MB, far fewer are in memory at the same time."""
    size = (1024, 1024)

    def read():
        return wrap(np.ones(size, np.float32))

    tensors = {
        f"blk.{layer}.attn_q.weight": SourceTensor("float32", size, read)
        for layer in range(24)
    }
    source = GgufSource({"general.architecture": "x"}, tensors)
    write_gguf(source, tmp_path / "warm.gguf", "q8_0")
    tracemalloc.start()
    try:
        write_gguf(source, tmp_path / "m.gguf", "q8_0")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * 4 * 2**20
