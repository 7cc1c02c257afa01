"""Arrays that are read when they are used."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.files.tensor_file import TensorFile
from inl.errors import CheckpointError
from inl.models.llama import MODEL
from inl.spec.tree import leaves
from inl.weights.load import read_shard, stored_specs
from inl.weights.plan import plan_weights
from inl.weights.unread import UnreadArray

NAME = "model.embed_tokens.weight"


@pytest.fixture(params=["F32", "Q8_0"])
def checkpoint(request, gguf_writer, tensors, tmp_path):
    kind = gguf.GGMLQuantizationType[request.param]
    return open_checkpoint(gguf_writer(tmp_path / "m.gguf", tensors, kind=kind))


@pytest.fixture
def reads(monkeypatch):
    """Sizes in bytes of what is read from files."""
    sizes = []
    read = TensorFile.read_into

    def counted(self, target, start):
        sizes.append(len(target))
        read(self, target, start)

    monkeypatch.setattr(TensorFile, "read_into", counted)
    return sizes


def test_the_tensor_is_read_once_and_when_it_is_used(checkpoint, reads):
    array = UnreadArray(checkpoint, NAME)
    whole = checkpoint.tensor(NAME)
    reads.clear()
    assert (array.dtype, array.shape, array.size) == (
        whole.dtype, whole.shape, whole.size,
    )  # fmt: skip
    assert not reads
    assert np.array_equal(array.data, whole.data)
    assert np.array_equal(array.data, whole.data)
    assert reads == [whole.data.nbytes]


def test_rows_are_those_of_the_tensor(checkpoint):
    whole, indices = checkpoint.tensor(NAME), np.array([0, 7, 3])
    array = UnreadArray(checkpoint, NAME)
    assert np.array_equal(array.rows(indices), whole.data[indices])
    assert array.data is not None
    assert np.array_equal(array.rows(indices), whole.data[indices])


def test_only_the_rows_are_read_of_a_quantized_tensor(reads, default_checkpoint):
    array = UnreadArray(default_checkpoint, NAME)
    rows = array.rows(np.array([5, 9]))
    assert reads == [rows[0].nbytes] * 2


@pytest.mark.parametrize("rows", [1, 7, 8, 10**6])
def test_pieces_are_the_tensor(checkpoint, rows):
    whole = checkpoint.tensor(NAME)
    array = UnreadArray(checkpoint, NAME)
    pieces = [(piece.shape, piece.data.copy()) for piece in array.pieces(rows)]
    assert np.array_equal(np.concatenate([data for _, data in pieces]), whole.data)
    assert sum(shape[0] for shape, _ in pieces) == whole.shape[0]
    assert {shape[1:] for shape, _ in pieces} == {whole.shape[1:]}


def test_pieces_of_a_quantized_tensor_share_memory(reads, default_checkpoint):
    array = UnreadArray(default_checkpoint, NAME)
    memory = {piece.data.ctypes.data for piece in array.pieces(4096)}
    assert len(memory) == 1
    assert len(reads) == array.shape[0] / 4096
    whole = default_checkpoint.tensor(NAME).data
    numbers = [piece.data.sum(dtype=np.int64) for piece in array.pieces(4096)]
    assert sum(numbers) == whole.sum(dtype=np.int64)


def test_a_number_in_a_later_piece_is_named_by_its_place(default_checkpoint):
    last = default_checkpoint.tensor(NAME).data[-1]

    def check(array):
        where = np.argwhere((array.data == last).all(axis=-1))
        if len(where):
            raise CheckpointError(f"row {where[0, 0]}")

    array = UnreadArray(default_checkpoint, NAME, check)
    with pytest.raises(CheckpointError, match=f"row {array.shape[0] - 1}"):
        for _ in array.pieces(4096):
            pass


def test_arrays_of_one_tensor_have_one_origin(checkpoint):
    one, same = UnreadArray(checkpoint, NAME), UnreadArray(checkpoint, NAME)
    assert one.origin == same.origin
    other = UnreadArray(checkpoint, "model.layers.0.mlp.up_proj.weight")
    assert one.origin != other.origin


@pytest.mark.parametrize("check", [True, False])
def test_numbers_are_checked_when_a_tensor_is_read(
    check, gguf_writer, tensors, tmp_path
):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: data.copy() for name, data in tensors.items()}
    tensors[name][3, 1] = np.nan
    checkpoint = open_checkpoint(gguf_writer(tmp_path / "m.gguf", tensors))
    tree = MODEL.weights(MODEL.config(checkpoint.config))
    plans = leaves(plan_weights(tree, (), stored_specs(checkpoint)))
    (found,) = (
        read_shard(checkpoint, planned, param, 0, "float32", check=check)
        for planned in plans
        for param in planned.group.params.values()
        if param.source == name
    )
    if not check:
        assert np.isnan(found.data[3, 1])
        return
    with pytest.raises(CheckpointError, match=r"up_proj.weight: found nan at \[3, 1\]"):
        _ = found.data
