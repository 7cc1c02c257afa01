"""Importance matrices in both formats of llama-imatrix."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from inl.checkpoints.files.tensor_file import TensorFile
from inl.checkpoints.gguf.imatrix import read_imatrix
from inl.errors import CheckpointError

NAMES = "blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"


def dat(path, entries):
    parts = [struct.pack("<i", len(entries))]
    for name, calls, values in entries:
        data = np.asarray(values, "<f4")
        parts += [struct.pack("<i", len(name)), name.encode(),
                  struct.pack("<ii", calls, len(data)), data.tobytes()]  # fmt: skip
    parts += [struct.pack("<ii", 3, 4), b"text"]
    path.write_bytes(b"".join(parts))
    return path


def test_a_dat_file_has_sums_over_calls(tmp_path):
    path = dat(tmp_path / "i.dat", [(NAMES[0], 4, [4, 8, 0]), (NAMES[1], 1, [5])])
    found = read_imatrix(path)
    assert {name: each.tolist() for name, each in found.items()} == {
        NAMES[0]: [1, 2, 0],
        NAMES[1]: [5],
    }


def test_a_gguf_file_has_sums_and_counts(tmp_path):
    path = tmp_path / "i.gguf"
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_tensor(f"{NAMES[0]}.in_sum2", np.array([[4, 8]], np.float32))
    writer.add_tensor(f"{NAMES[0]}.counts", np.array([[4]], np.float32))
    # The second of three experts was never chosen.
    sums = np.array([[2, 4], [0, 0], [9, 3]], np.float32)
    writer.add_tensor(f"{NAMES[1]}.in_sum2", sums)
    writer.add_tensor(f"{NAMES[1]}.counts", np.array([[2], [0], [3]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_imatrix(path)
    assert found[NAMES[0]].tolist() == [1, 2]
    assert found[NAMES[1]].tolist() == [1, 2, 1, 1, 3, 1]


def test_a_gguf_file_that_is_refused_is_closed(tmp_path, monkeypatch):
    path = tmp_path / "i.gguf"
    writer = gguf.GGUFWriter(path, "")
    writer.add_tensor(f"{NAMES[0]}.in_sum2", np.array([[4, 8]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened, start = [], TensorFile.__init__

    def opens(file, *places):
        opened.append(file)
        start(file, *places)

    monkeypatch.setattr(TensorFile, "__init__", opens)
    with pytest.raises(CheckpointError, match=r"counts'?: not found"):
        read_imatrix(path)
    assert [file.close.alive for file in opened] == [False, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found its end at byte 0"),
        (b"\0\0\0\0", "number of entries: found 0"),
        (b"\xff\xff\xff\x7f", "number of entries: found 2147483647"),
        (struct.pack("<ii", 1, 99) + b"short", "found its end"),
        (struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 1 << 30), "number of"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, content, message):
    path = tmp_path / "i.dat"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_imatrix(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1])
def test_numbers_that_are_no_means_of_squares_are_refused(tmp_path, bad):
    path = dat(tmp_path / "i.dat", [(NAMES[0], 1, [1, bad])])
    with pytest.raises(CheckpointError, match="found negative numbers, NaN"):
        read_imatrix(path)
