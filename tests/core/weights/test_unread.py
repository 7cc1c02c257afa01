"""Arrays that are read when they are used."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from inl.backend.reference import ReferenceBackend
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.files.tensor_file import TensorFile
from inl.device import Device
from inl.dtypes import wrap
from inl.errors import CheckpointError
from inl.models.llama import MODEL
from inl.placement.mesh import Mesh
from inl.placement.placement import Placement
from inl.spec.tree import leaves
from inl.spec.weights import Group, Param
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl.weights.load import load_weights, read_shard, stored_specs
from inl.weights.plan import WeightPlan, plan_weights
from inl.weights.unread import DividedArray, UnreadArray

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


@pytest.fixture
def folder(tensors, tmp_path):
    """The same tensors in a folder, in float32."""
    stored = {name: np.asarray(each, np.float32) for name, each in tensors.items()}
    (tmp_path / "config.json").write_text("{}")
    save_file(stored, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path)


def test_a_rank_reads_its_own_rows_alone(folder, reads):
    name = "model.layers.0.self_attn.q_proj.weight"
    dtype, shape = folder.spec(name)
    param = Param(name, shape, axis=0)
    plan = WeightPlan(Group("embedding", weight=param), None, ranks=2)
    whole = folder.tensor(name).data
    halves = np.split(whole, 2)
    reads.clear()
    for rank, half in enumerate(halves):
        part = read_shard(folder, plan, param, rank, dtype)
        assert np.array_equal(part.data, half)
        assert part.origin is None
    assert reads == [halves[0].nbytes] * 2
    assert len(folder.rows(name, len(whole) - 1, len(whole) + 9).data) == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_read_when_they_are_used(axis):
    whole = np.arange(48.0).reshape(4, 12)
    read = []

    def part(rank):
        read.append(rank)
        return wrap(np.split(whole, 4, axis)[rank])

    def index(start, stop):
        return tuple(slice(start, stop) if at == axis else slice(None) for at in (0, 1))

    array = DividedArray("float64", whole.shape, axis, 4, part)
    size = whole.shape[axis] // 4
    for _ in range(2):
        found = array.part(index(size, 3 * size))
        assert np.array_equal(found, whole[index(size, 3 * size)])
        assert read == [1, 2]
    other = index(2 * size + 1, None) if size > 1 else index(2 * size, 3 * size)
    assert np.array_equal(array.part(other), whole[other])
    assert np.array_equal(array.data, whole)
    assert sorted(read) == [0, 1, 2, 3]
    assert (array.size, array.origin) == (48, None)


def test_a_process_of_a_mesh_reads_what_its_devices_have():
    """Numbers of other devices are not even checked; float64 becomes float32."""
    config, tensors = tiny_llama(np.random.default_rng(7), kv_heads=2, bias=True)
    tensors = {name: np.asarray(each, np.float64) for name, each in tensors.items()}
    for name in ("q_proj.weight", "k_proj.bias", "o_proj.weight"):
        data = tensors[f"model.layers.0.self_attn.{name}"]
        data[(..., -1) if name[0] == "o" else -1] = np.nan
    checkpoint = MemoryCheckpoint(config, tensors)
    stored = stored_specs(checkpoint)
    groups = plan_weights(MODEL.weights(MODEL.config(config)), (), stored, ranks=2)

    def of_first(host, axes, _partial):
        assert host.dtype == "float32"
        index = [slice(None)] * len(host.shape)
        for axis, name in enumerate(axes):
            if name is not None:
                index[axis] = slice(host.shape[axis] // 2)
        return host.part(tuple(index))

    class OneOfTwo(ReferenceBackend):
        def offers(self, kind):
            if kind is not Mesh:
                return super().offers(kind)
            return Mesh(Placement(tensor=2), of_first, self.processes, None, None)

    backend = OneOfTwo(Device("reference"), dtype="float32")
    backend.processes = 2
    found = [*leaves(load_weights(groups, checkpoint, backend, "float32").layers)]
    one = ReferenceBackend(Device("reference"), dtype="float32")
    rank = [*leaves(load_weights(groups, checkpoint, one, "float32", rank=0).layers)]
    assert len(found) == len(rank) > 10
    for array, own in zip(found, rank, strict=True):
        assert array.shape == own.shape
        assert np.array_equal(array, own)
    backend.processes = 1
    with pytest.raises(CheckpointError, match="found nan"):
        load_weights(groups, checkpoint, backend, "float32")
