"""GGUF files of each kind: dtypes, errors of the weights, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.gguf.file import GgufFile
from inl.convert.gguf_kinds import KINDS, dtypes, gets_more
from inl.convert.gguf_source import GgufSource, SourceTensor, source_of_gguf
from inl.convert.write_gguf import write_gguf
from inl.dtypes import cast, wrap
from inl.errors import CheckpointError

WIDE, NARROW = (8, 512), (8, 96)


def tensor(values, dtype="float32"):
    array = cast(np.asarray(values, np.float32), dtype)
    return SourceTensor(dtype, array.shape, lambda: array)


def model(*, tied=False, seed=0, layers=8, dtype="float32"):
    rng = np.random.default_rng(seed)
    found = {
        "token_embd.weight": WIDE,
        "output_norm.weight": (512,),
        "rope_freqs.weight": (8,),
    }
    if not tied:
        found["output.weight"] = WIDE
    for layer in range(layers):
        found |= {
            f"blk.{layer}.attn_q.weight": WIDE,
            f"blk.{layer}.attn_q.bias": (8,),
            f"blk.{layer}.attn_v.weight": WIDE,
            f"blk.{layer}.ffn_down.weight": WIDE,
            f"blk.{layer}.ffn_up.weight": NARROW,
            f"blk.{layer}.ffn_gate_inp.weight": (4, 512),
            f"blk.{layer}.ffn_up_exps.weight": (3, 8, 512),
            f"blk.{layer}.odd.weight": (4, 50),
        }
    tensors = {
        name: tensor(rng.standard_normal(shape) * 0.02, dtype)
        for name, shape in found.items()
    }
    metadata = {"general.architecture": "made-up", "made-up.block_count": layers}
    return GgufSource(metadata, tensors)


def quantized(tmp_path, source, kind, **options):
    path = tmp_path / f"{kind}.gguf"
    written = write_gguf(source, path, kind, **options)
    return written, GgufFile(path)


def test_the_mix_of_q4_k_m():
    source = model()
    found = dtypes(KINDS["q4_k_m"], source.tensors, source.metadata)
    assert found["token_embd.weight"] == found["blk.0.ffn_up_exps.weight"] == "q4_k"
    assert found["output.weight"] == "q6_k"
    # Of 8 layers: the first, the last, and every third from the fourth on.
    more = [found[f"blk.{layer}.ffn_down.weight"] for layer in range(8)]
    assert more == ["q6_k", "q4_k", "q4_k", "q6_k", "q4_k", "q4_k", "q6_k", "q6_k"]
    assert more == [found[f"blk.{layer}.attn_v.weight"] for layer in range(8)]
    assert found["blk.0.ffn_up.weight"] == "q5_0", "96 columns"
    assert found["blk.0.odd.weight"] == "float16", "50 columns"
    for name in ("output_norm.weight", "blk.0.attn_q.bias", "rope_freqs.weight",
                 "blk.0.ffn_gate_inp.weight"):  # fmt: skip
        assert found[name] == "float32"


def test_an_embedding_that_is_the_head_has_the_dtype_of_the_head():
    source = model(tied=True)
    for kind, dtype in (("q4_0", "q6_k"), ("q4_k_m", "q6_k"), ("q8_0", "q8_0")):
        found = dtypes(KINDS[kind], source.tensors, source.metadata)
        assert found["token_embd.weight"] == dtype


def test_layers_that_get_more_are_those_of_llama_cpp():
    """The first and last eighth, and every third between."""
    more = [layer for layer in range(30) if gets_more(layer, 30)]
    assert more == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_kind_is_read_by_the_gguf_package(tmp_path, kind):
    source = model(layers=1)
    written, found = quantized(tmp_path, source, kind)
    assert written.bytes == written.path.stat().st_size
    reader = gguf.GGUFReader(written.path)
    assert reader.get_field("general.file_type").contents() == KINDS[kind].file_type
    name = {"q4_k_m": "MOSTLY_Q4_K_M", "q5_k_m": "MOSTLY_Q5_K_M", "f32": "ALL_F32"}
    known = gguf.LlamaFileType[name.get(kind, f"MOSTLY_{kind.upper()}")]
    assert known == KINDS[kind].file_type
    bound = {"q4_0": 0.13, "q4_k_m": 0.1, "q5_k_m": 0.05, "q6_k": 0.025, "q8_0": 0.01,
             "bf16": 0.003, "f16": 0.001, "f32": 0}[kind]  # fmt: skip
    for each in reader.tensors:
        original = source.tensors[each.name].read().data.astype(np.float64)
        decoded = gguf.dequantize(each.data, each.tensor_type).astype(np.float64)
        decoded = decoded.reshape(original.shape)
        error = np.linalg.norm(decoded - original) / np.linalg.norm(original)
        assert error <= bound, each.name
        assert found.tensors[each.name].shape == original.shape
    rows = {layer.name: layer.error for layer in written.quantization.layers}
    for each in reader.tensors:
        if each.name in rows:
            original = source.tensors[each.name].read().data.astype(np.float64)
            decoded = gguf.dequantize(each.data, each.tensor_type).reshape(
                original.shape
            )
            exact = np.linalg.norm(decoded - original) / np.linalg.norm(original)
            assert rows[each.name] == pytest.approx(exact, rel=1e-4)


def test_importance_of_columns_and_of_experts(tmp_path):
    source = model(layers=1)
    rng = np.random.default_rng(3)
    name, experts = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"
    importance = {
        name: np.exp(rng.normal(0, 2, 512)).astype(np.float32),
        experts: np.exp(rng.normal(0, 2, 3 * 512)).astype(np.float32),
    }
    _, plain = quantized(tmp_path, source, "q4_k_m")
    (tmp_path / "weighted").mkdir()
    _, found = quantized(tmp_path / "weighted", source, "q4_k_m", importance=importance)

    def error(file, which):
        entry = file.tensors[which]
        kind = gguf.GGMLQuantizationType[entry.dtype.upper()]
        decoded = gguf.dequantize(file.file.rows(entry).data, kind)
        change = decoded.astype(np.float64) - source.tensors[which].read().data
        weights = importance[which].reshape(-1, 1, 512) if which == experts else (
            importance[which])  # fmt: skip
        return float((weights * change**2).sum())

    for which in importance:
        assert error(found, which) < 0.9 * error(plain, which)


def test_an_imatrix_of_another_model_is_refused(tmp_path):
    source = model(layers=1)
    for importance, message in (
        ({"blk.9.other.weight": np.ones(512, np.float32)}, "none of which is in"),
        (
            {"blk.0.attn_q.weight": np.ones(7, np.float32)},
            "found 7 numbers; accepted: ",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            quantized(tmp_path, source, "q4_k_m", importance=importance)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m", "q6_k", "f16", "f32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, kind, bad):
    source = model(layers=1)
    values = source.tensors["blk.0.attn_q.weight"].read().data.copy()
    values[3, 7] = bad
    tensors = dict(source.tensors) | {"blk.0.attn_q.weight": tensor(values)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight.* at \[3, 7\]"):
        quantized(tmp_path, source._replace(tensors=tensors), kind)
    assert list(tmp_path.iterdir()) == []


def test_numbers_above_those_of_float16_are_refused(tmp_path):
    source = model(layers=1)
    tensors = dict(source.tensors)
    tensors["output.weight"] = tensor(np.full(WIDE, 7e4))
    with pytest.raises(CheckpointError, match=r"above 65504.* accepted: --kind bf16"):
        quantized(tmp_path, source._replace(tensors=tensors), "f16")
    quantized(tmp_path, source._replace(tensors=tensors), "bf16")


def test_a_quantized_file_is_quantized_again_only_if_it_is_asked_for(tmp_path):
    written, _ = quantized(tmp_path, model(layers=1), "q8_0")
    source = source_of_gguf(written.path)
    with pytest.raises(CheckpointError, match="found q8_0, which is quantized already"):
        quantized(tmp_path, source, "q4_0")
    _, found = quantized(tmp_path, source, "q4_0", requantize=True)
    assert found.tensors["blk.0.attn_q.weight"].dtype == "q4_0"
    # Of the same dtype nothing changes.
    again, _ = quantized(tmp_path, source, "q8_0", requantize=False)
    assert again.quantization.layers == ()


def test_bytes_do_not_depend_on_threads(tmp_path, monkeypatch):
    source = model(layers=2)
    first = quantized(tmp_path, source, "q4_k_m")[0].path.read_bytes()
    monkeypatch.setattr("inl.convert.write_gguf.threads", lambda: 7)
    monkeypatch.setattr("inl.convert.write_gguf.CHUNK", 512)
    assert quantized(tmp_path, source, "q4_k_m")[0].path.read_bytes() == first


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    quantized(tmp_path, model(layers=2), "q8_0", progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_check_sees_small_tensors_before_the_large_ones_are_read(tmp_path):
    source = model(layers=1)
    read = []

    def noted(name):
        original = source.tensors[name]
        return original._replace(read=lambda: read.append(name) or original.read())

    def check(path):
        file = GgufFile(path)
        entry = file.tensors["rope_freqs.weight"]
        expected = source.tensors["rope_freqs.weight"].read().data
        assert np.array_equal(file.file.array(entry).data, expected)
        assert read == ["rope_freqs.weight"]
        raise CheckpointError("refused")

    changed = GgufSource(
        source.metadata, {name: noted(name) for name in source.tensors}, check
    )
    with pytest.raises(CheckpointError, match="refused"):
        quantized(tmp_path, changed, "q8_0")
    assert list(tmp_path.iterdir()) == []


def test_stored_values_stay_bit_for_bit_without_a_kind(tmp_path):
    source = model(layers=1, dtype="bfloat16")
    path = tmp_path / "m.gguf"
    write_gguf(source, path, None)
    found = GgufFile(path)
    entry = found.tensors["blk.0.attn_q.weight"]
    expected = source.tensors["blk.0.attn_q.weight"].read().data
    assert np.array_equal(found.file.array(entry).data, expected)
    assert found.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    wide = found.file.array(found.tensors["output_norm.weight"])
    assert wide.dtype == wrap(np.zeros(1, np.float32)).dtype == "float32"
