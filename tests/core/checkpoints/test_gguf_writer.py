"""GGUF files that are written: read by the gguf package and by our own reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.gguf.file import GgufFile
from inl.checkpoints.gguf.writer import GgufWriter, TensorSpec
from inl.convert.gguf_source import typed
from inl.dtypes import cast, wrap

METADATA = {
    "general.architecture": "llama",
    "a.text": "naïve ☃",
    "a.uint32": 7,
    "a.float32": 0.1,
    "a.bool": True,
    "a.uint8": np.uint8(200),
    "a.int8": np.int8(-3),
    "a.uint16": np.uint16(65535),
    "a.int16": np.int16(-5),
    "a.int32": np.int32(-7),
    "a.uint64": np.uint64(2**63),
    "a.int64": np.int64(-(2**40)),
    "a.float64": np.float64(0.1),
    "a.strings": ["", "a", "☃☃"],
    "a.none": [],
    "a.floats": np.array([0.5, -1e30], np.float32),
    "a.flags": np.array([True, False, True]),
    "a.nested": [np.array([1, 2], np.int32), np.array([3], np.int32)],
}


@pytest.fixture
def written(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 5)).astype(np.float32)
    arrays = {
        "odd.weight": wrap(values[:, :3]),
        "half.weight": wrap(values.astype(np.float16)),
        "b.weight": cast(values, "bfloat16"),
        "one": wrap(values[0]),
        "cube": wrap(rng.standard_normal((2, 3, 4)).astype(np.float32)),
    }
    path = tmp_path / "w.gguf"
    with path.open("wb") as file:
        specs = {name: TensorSpec(a.dtype, a.shape) for name, a in arrays.items()}
        writer = GgufWriter(file, METADATA, specs)
        writer.extend()
        for name in reversed(arrays):  # any order
            writer.write(name, arrays[name])
    assert path.stat().st_size == writer.size
    return path, arrays


def test_the_gguf_package_reads_every_value_and_type(written):
    path, arrays = written
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        if key in ("a.nested", "a.none"):
            continue  # which that reader does not have
        found = reader.get_field(key)
        expected = value.tolist() if hasattr(value, "tolist") else value
        if key == "a.float32":
            expected = float(np.float32(value))
        assert found.contents() == expected, key
        if key.removeprefix("a.") in ("uint8", "int8", "uint16", "int16", "uint32",
                                      "int32", "uint64", "int64", "float32",
                                      "float64", "bool"):  # fmt: skip
            assert found.types[0].name.lower() == key.removeprefix("a.")
    assert {each.name for each in reader.tensors} == set(arrays)
    for each in reader.tensors:
        array = arrays[each.name]
        assert tuple(map(int, each.shape)) == array.shape[::-1]
        assert each.data_offset % 32 == 0
        assert each.data.tobytes() == np.ascontiguousarray(array.data).tobytes()


def test_our_reader_gives_the_same_and_its_types_are_kept(written, tmp_path):
    path, arrays = written
    found = GgufFile(path)
    assert list(found.metadata) == list(METADATA)
    for key, value in METADATA.items():
        assert np.array_equal(found.metadata[key], value) or key in (
            "a.float32", "a.nested", "a.strings")  # fmt: skip
    assert list(found.metadata["a.strings"]) == METADATA["a.strings"]
    for name, array in arrays.items():
        entry = found.tensors[name]
        assert (entry.dtype, entry.shape) == (array.dtype, array.shape)
        assert np.array_equal(found.file.array(entry).data, array.data)
    again = tmp_path / "again.gguf"
    with again.open("wb") as file:
        values = {k: typed(v, found.kinds[k]) for k, v in found.metadata.items()}
        GgufWriter(file, values, {})
    with (tmp_path / "plain.gguf").open("wb") as file:
        GgufWriter(file, METADATA, {})
    assert again.read_bytes() == (tmp_path / "plain.gguf").read_bytes()
