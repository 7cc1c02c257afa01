"""Conversion of host arrays and tensors, and allocation of states."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from inl.backend.state_bytes import state_bytes
from inl.dtypes import E4M3, FLOATS, SIZES, HostArray, cast, wrap
from inl.errors import DeviceError, OutOfMemory
from inl.spec.cache import KvScales, Paged, Slotted
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl_torch.tensors import DTYPES, aliased, from_host, to_host, torch_dtype


def test_every_plain_dtype_has_a_torch_dtype_of_its_size():
    sizes = {**SIZES, E4M3: 1}
    assert set(DTYPES) == set(sizes)
    for name, dtype in DTYPES.items():
        assert torch.empty(0, dtype=dtype).element_size() == sizes[name], name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_there_and_back_is_equal(dtype, shape, seed):
    values = np.random.default_rng(seed).standard_normal(shape)
    array = cast(np.asarray(values), dtype)
    tensor = from_host(array)
    assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[dtype], shape)
    back = to_host(tensor)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back.data.reshape(shape), array.data.reshape(shape))


@pytest.mark.parametrize("dtype", [*FLOATS, E4M3])
def test_an_alias_is_the_array(dtype):
    array = cast(np.arange(12.0).reshape(3, 4), dtype)
    tensor = aliased(array)
    assert tensor.dtype == DTYPES[dtype]
    assert tensor.data_ptr() == array.data.ctypes.data
    assert tensor.float().tolist() == np.arange(12.0).reshape(3, 4).tolist()


def test_bfloat16_bits_equal_ml_dtypes(seed):
    values = np.random.default_rng(seed).standard_normal(1000)
    want = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    tensor = from_host(cast(values.astype(np.float32), "bfloat16"))
    outside = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(tensor.float().numpy(), outside)
    assert np.abs(outside - want).max() < 0.02


def test_a_writable_array_is_copied(backend):
    data = np.arange(4, dtype=np.float32)
    tensor = backend.tensor(wrap(data))
    data[:] = 9
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor[:] = 5
    assert data.tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mapped_file_is_aliased(dtype, tmp_path, backend):
    path = tmp_path / "weights"
    path.write_bytes(cast(np.arange(64, dtype=np.float32), dtype).data.tobytes())
    mapped = np.memmap(path, np.uint16 if dtype == "bfloat16" else np.float32, "r")
    tensor = backend.tensor(HostArray(mapped, dtype, (8, 8)))
    assert tensor.data_ptr() == mapped.ctypes.data
    assert tensor.shape == (8, 8)
    del mapped
    assert tensor.double().sum() == 2016


@pytest.mark.parametrize("kind", ["unaligned", "strided", "foreign"])
def test_noncontiguous_memory_is_copied(kind):
    raw = np.frombuffer(b"\0" + np.arange(8, dtype=np.float32).tobytes(), np.uint8)
    if kind == "unaligned":
        data = raw[1:].view(np.float32)
    elif kind == "strided":
        data = np.arange(16, dtype=np.float32)[::2] / 2
        data.setflags(write=False)
        data = np.broadcast_to(data[None], (1, 8))[0]
    else:
        data = np.arange(8, dtype=">f4")
        data.setflags(write=False)
    assert from_host(HostArray(data, "float32", (8,))).tolist() == list(range(8))


def test_an_unknown_dtype_is_named():
    with pytest.raises(DeviceError, match=r"'q4_1', torch takes float64, float32"):
        torch_dtype("q4_1")


def test_a_host_copy_does_not_alias_the_tensor(backend):
    tensor = torch.zeros(3)
    array = backend.numpy(tensor)
    tensor[:] = 7
    assert array.data.tolist() == [0, 0, 0]


def limits(blocks):
    return Limits(
        slots=3, blocks=(blocks,), block_size=16, max_blocks_per_seq=4, vocab=97
    )


def test_state_is_zero_and_shares_nothing(backend):
    spec = (Paged((0, 2), 2, 8, "bfloat16"), Slotted("v", (5,), "float32", "replay"))
    state = backend.state(spec, limits=limits(7))
    assert [cache.k.shape for cache in state.caches] == [(7, 16, 2, 8)] * 2
    buffers = [*leaves(state.caches)]
    buffers += [state.slotted["v"], *state.tables]
    assert len({x.data_ptr() for x in buffers}) == len(buffers)
    assert not any(x.any() for x in buffers)
    assert state.caches[0].k.dtype == torch.bfloat16
    assert state.slotted["v"].shape == (3, 5)
    assert state.tables.blocks.shape == (1, 3, 4)
    assert state.tables.params.dtype == torch.float32


def allocated_bytes(state):
    caches = [*leaves(state.caches)]
    return sum(x.nbytes for x in (*caches, *state.slotted.values(), *state.tables))


@pytest.mark.parametrize("sampler", ["greedy", "sample_filtered"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_state_bytes_are_those_allocated(backend, dtype, sampler):
    paged = Paged((0, 2), 2, 8, dtype), Paged((1,), 3, 16, dtype, 20)
    spec = (*paged, Slotted("v", (5,), "float32", "replay"))
    sizes = replace(limits(7), blocks=(7, 4), sampler=sampler)
    state = backend.state(spec, limits=sizes)
    assert state_bytes(spec, sizes) == allocated_bytes(state)


def test_state_bytes_of_float8_are_those_of_its_numbers(backend):
    spec = (Paged((0, 2), 2, 8, E4M3, scales=(KvScales(0.5, 3.0), KvScales())),)
    state = backend.state(spec, limits=limits(7))
    scales = [cache.scales.tolist() for cache in state.caches]
    assert scales == [[0.5, 3.0], [1.0, 1.0]]
    assert state_bytes(spec, limits(7)) == allocated_bytes(state) - 2 * 8
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    host = to_host(numbers)
    assert host.dtype == E4M3
    assert np.array_equal(host.data, np.arange(256))
    back = from_host(host)
    assert back.dtype == numbers.dtype
    assert torch.equal(back.view(torch.uint8), numbers.view(torch.uint8))


def test_state_bytes_of_int8_include_the_scales(backend):
    """The default layout allocates no scales: one float32 per token and head."""
    spec = (Paged((0, 2), 2, 8, "int8"),)
    allocated = allocated_bytes(backend.state(spec, limits=limits(7)))
    scales = 2 * 2 * 7 * 16 * 2 * 4
    assert state_bytes(spec, limits(7)) == allocated + scales


def test_an_out_of_memory_error_of_the_state_names_its_bytes(backend):
    spec = (Paged((0,), 2, 8, "float32"),)
    blocks = 2**45
    nbytes = state_bytes(spec, limits(blocks))
    assert nbytes > 2 * blocks * 16 * 2 * 8 * 4
    with pytest.raises(OutOfMemory, match=rf"cpu:0: state: {nbytes} bytes"):
        backend.state(spec, limits=limits(blocks))


def test_other_errors_are_unchanged(backend):
    spec = (Paged((0,), 2, 8, "float32"),)
    with pytest.raises(RuntimeError, match="negative"):
        backend.state(spec, limits=limits(-5))
