"""Admissions and releases between two steps are batched, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.device import Device
from inl.executor.model_executor import MAX_ADMISSIONS
from inl.ops.step import admit, empty_tables
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, release_frame, step_frame
from inl.spec.step import Bucket
from inl_torch.backend import TorchBackend, inference_mode

SLOTS = 40
LIMITS = Limits(slots=SLOTS, blocks=(50,), block_size=4, max_blocks_per_seq=8, vocab=97)


class Counting(TorchBackend):
    """Records the number of frames of each admission call."""

    traits = Traits()

    def __init__(self, buckets):
        self.device, self.place = Device("cpu:0"), torch.device("cpu")
        self._buckets, self.entered = buckets, []

    def memory(self):
        return host_memory()

    def buckets(self, limits):
        return self._buckets

    def compile(self, function, bucket, *, consumes, info):
        def run(*args):
            if len(args) == 2:
                self.entered.append(len(args[0]))
            return inference_mode(function)(*args)

        return run


def frame(slot, last):
    return admit_frame(
        slot, [[slot]], groups=1, max_blocks_per_seq=8, length=2, last=last
    )


def step():
    rows = [Row(1, [5, 6])]
    return step_frame(Bucket(8, 2), rows, step=0, groups=1, block_size=4, decode_rows=0)


def run_frames(tiny_llama, buckets, frames):
    """Tables of a runner after a step, and the sizes of its admission calls."""
    backend = Counting(buckets)
    runner = tiny_llama(3).runner(backend, "float32", LIMITS)
    for each in frames:
        runner.submit(each)
        each[:] = -1  # the caller may reuse the memory
    assert backend.entered == []
    runner.submit(step())
    tables = runner.executor.state.tables
    return {n: getattr(tables, n).numpy() for n in ("blocks", "last")}, backend.entered


@pytest.mark.parametrize("buckets", [(), (Bucket(8, 2),)])
def test_each_slot_is_set_by_its_last_frame(tiny_llama, buckets):
    frames = [frame(slot, slot) for slot in range(1, 20)]
    frames += [
        release_frame(slot, groups=1, max_blocks_per_seq=8) for slot in range(2, 8)
    ]
    frames += [
        frame(3, 50),
        frame(4, 51),
        release_frame(4, groups=1, max_blocks_per_seq=8),
    ]
    want = empty_tables(groups=1, slots=SLOTS, max_blocks_per_seq=8)
    for each in frames:
        want = admit.body(each[None], want)
    found, entered = run_frames(tiny_llama, buckets, frames)
    np.testing.assert_array_equal(found["blocks"], want.blocks)
    np.testing.assert_array_equal(found["last"][2:], want.last[2:])
    assert entered == (
        [MAX_ADMISSIONS, MAX_ADMISSIONS] if buckets else [MAX_ADMISSIONS, 3]
    )


@pytest.mark.parametrize(("count", "calls"), [(1, [1]), (2, [16]), (17, [16, 1])])
def test_admission_programs_have_two_sizes(tiny_llama, count, calls):
    frames = [frame(slot, slot) for slot in range(1, count + 1)]
    found, entered = run_frames(tiny_llama, (Bucket(8, 2),), frames)
    assert entered == calls
    assert found["blocks"][0, count, 0] == count
