"""Memory for blocks: what is in use is not used again, and what is not, is."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from inl.dtypes import HostArray
from inl.errors import OutOfMemory
from inl_torch.gpu import pinned_memory
from inl_torch.gpu.blocks import InFlight, PinnedBlock
from inl_torch.gpu.pinned_memory import PinnedMemory, arrays_of
from waiting import until

SHAPE = 2, 3, 1, 5
BYTES = 60


class Pieces:
    """Allocates pieces, and counts those that the test's thread asks for."""

    def __init__(self):
        self.sizes, self.own = [], 0

    def __call__(self, size):
        self.sizes.append(size)
        self.own += threading.current_thread() is threading.main_thread()
        return np.zeros(size, np.uint8)


@pytest.fixture
def few(monkeypatch):
    """Four arrays of a piece, and no threads."""
    monkeypatch.setattr(pinned_memory, "PIECE", 4 * BYTES)
    monkeypatch.setattr(pinned_memory, "AHEAD", 0)


@pytest.mark.usefixtures("few")
def test_arrays_do_not_overlap_and_memory_is_used_again():
    pieces = Pieces()
    memory = PinnedMemory(pieces)
    arrays = [memory.empty(SHAPE, np.uint16) for _ in range(6)]
    for number, array in enumerate(arrays):
        array[...] = number
    assert [set(array.reshape(-1)) for array in arrays] == [{n} for n in range(6)]
    assert pieces.sizes == [4 * BYTES] * 2
    view = arrays.pop()[1:]  # keeps its memory
    arrays.clear()
    del array
    arrays = [memory.empty(SHAPE, "uint16") for _ in range(7)]
    for array in arrays:
        array[...] = 9
    assert (len(pieces.sizes), set(view.reshape(-1))) == (2, {5})
    memory.empty((3, 2), "float32")  # another size has memory of its own
    assert pieces.sizes[2:] == [4 * BYTES // 24 * 24]


def test_threads_allocate_ahead_of_use(monkeypatch):
    monkeypatch.setattr(pinned_memory, "PIECE", 4 * BYTES)
    monkeypatch.setattr(pinned_memory, "AHEAD", 20 * BYTES)
    pieces = Pieces()
    memory = PinnedMemory(pieces)
    arrays, free = [], memory._free[BYTES]
    for _ in range(8):
        arrays.append(memory.empty(SHAPE, "uint16"))
        # As many as are in use are free, or are on their way.
        until(lambda: len(free) >= len(arrays) and not memory._threads)
    assert pieces.own == 1
    total = len(pieces.sizes)
    arrays += [memory.empty(SHAPE, "uint16") for _ in range(20)]
    until(lambda: len(free) >= 20 and not memory._threads)
    assert len(free) + len(arrays) == 4 * len(pieces.sizes)
    assert len(pieces.sizes) > total
    arrays.clear()
    total = len(pieces.sizes)
    arrays = [memory.empty(SHAPE, "uint16") for _ in range(20)]
    assert len(pieces.sizes) == total


def test_memory_that_cannot_be_allocated_is_said():
    def fails(size):
        raise MemoryError

    memory = PinnedMemory(fails)
    with pytest.raises(OutOfMemory, match="pinned memory"):
        memory.empty(SHAPE, "uint16")


def test_a_piece_has_few_arrays_of_any_size():
    assert arrays_of(100 << 20) == 1
    assert arrays_of(8 << 20) == 2
    assert arrays_of(64) == 512


class Event:
    done = False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


@pytest.mark.usefixtures("few")
def test_memory_of_copies_in_flight_is_not_used_again():
    memory = PinnedMemory(Pieces())
    free, in_flight = memory._free[BYTES], InFlight()
    events = [Event() for _ in range(3)]
    for event in events:
        in_flight.add(event, memory.empty(SHAPE, "uint16"))
    assert len(free) == 1
    events[1].done = True  # those of one stream end in order
    in_flight.add(Event(), None)
    assert len(free) == 1
    events[0].done = True
    in_flight.add(Event(), None)
    assert len(free) == 3
    assert not events[2].done
    del in_flight
    assert events[2].done
    assert len(free) == 4


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_the_tensor_of_a_block_is_in_its_memory(dtype):
    memory = PinnedMemory(partial(np.zeros, dtype=np.uint8))
    kind = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}.get(dtype, dtype)
    data = memory.empty((2, 2, 1, 3), kind)
    block = PinnedBlock.of(HostArray(data, dtype, data.shape))
    assert PinnedBlock.of(block) is block
    assert tuple(block.tensor.shape) == (2, 2, 3)
    block.tensor[1, 0, 2] = 1
    assert np.argwhere(data).tolist() == [[1, 0, 0, 2]]
