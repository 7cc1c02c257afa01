"""A model through the runner on torch, against NumPy in float64."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import final

import numpy as np
import pytest
import torch

from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.dtypes import wrap
from inl.executor.model_step import forward
from inl.spec.limits import Limits
from inl.spec.message import (
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.step import SAMPLERS, Bucket
from inl.spec.tree import leaves
from inl_torch.backend import TorchBackend
from inl_torch.eager import attention

BLOCK = 4
LIMITS = Limits(
    slots=5, blocks=(60,), block_size=BLOCK, max_blocks_per_seq=12, vocab=97
)


@final
class StaticTorch(TorchBackend):
    """Plans attention with static shapes, as on a GPU."""

    traits = Traits(dtypes=("float32",))

    def __init__(self):
        self.device = Device("cpu:0")
        self.place = torch.device("cpu")

    def memory(self):
        return host_memory()

    def kernels(self):
        for kernel in super().kernels():
            if kernel.op == "attention":
                yield replace(kernel, plan=attention.static_plan)
            else:
                yield kernel


class Traffic:
    """Frames of four sequences that arrive one after the other."""

    def __init__(self, rng, *, sampler="greedy", pads=(0, 0)):
        self.sampler, self.pads = sampler, pads
        self.rng = rng
        self.free = [int(block) for block in rng.permutation(np.arange(1, 60))]
        self.prompts = {
            slot: [int(t) for t in rng.integers(0, 97, rng.integers(3, 16))]
            for slot in range(1, 5)
        }
        self.done = dict.fromkeys(self.prompts, 0)
        self.mixed = 0

    def admissions(self):
        full = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.5}
        for slot, prompt in self.prompts.items():
            params = {
                "temperature": 0.8 if self.sampler != "greedy" and slot % 2 else 0
            }
            if self.sampler == "sample_filtered":
                params |= {**full, "repetition_penalty": 1 + 0.2 * slot}
            yield admit_frame(slot, (), groups=1, max_blocks_per_seq=12, **params)
            if self.sampler == "sample_filtered":
                marks = [TokenBias(token, 1, 0.5 * (token % 3)) for token in {*prompt}]
                yield token_bias_frame(slot, marks)

    def step(self, number):
        arrived = [slot for slot in self.prompts if 3 * (slot - 1) <= number]
        decoding = [s for s in arrived if self.done[s] >= len(self.prompts[s])]
        rows = [self.row(slot, [-1]) for slot in decoding]
        waiting = [slot for slot in arrived if slot not in decoding][:1]
        for slot in waiting:
            start = self.done[slot]
            rows.append(self.row(slot, self.prompts[slot][start : start + 5]))
        self.mixed += bool(decoding and waiting)
        cells = [cell for _, cells in rows for cell in cells]
        rows = [row for row, _ in rows]
        tokens = sum(len(row.tokens) for row in rows) + self.pads[1]
        return step_frame(
            Bucket(tokens, len(rows) + self.pads[0], sampler=self.sampler),
            rows,
            cells,
            step=number,
            groups=1,
            block_size=BLOCK,
            decode_rows=len(decoding),
        ), len(rows)

    def row(self, slot, tokens):
        start = self.done[slot]
        stop = self.done[slot] = start + len(tokens)
        first, last = -(-start // BLOCK), -(-stop // BLOCK)
        cells = [
            BlockTableUpdate(0, slot, index, self.free.pop())
            for index in range(first, last)
        ]
        return Row(slot, tokens, [float(self.rng.random())]), cells


def drive(runner, frames):
    """Tokens of every step, two in flight."""
    pending, chosen = deque(), []
    for frame, rows in frames:
        runner.submit(frame)
        if rows is None:
            continue
        pending.append(rows)
        if len(pending) == runner.limits.depth:
            chosen.append(runner.collect().tokens[: pending.popleft(), 0].tolist())
    while pending:
        chosen.append(runner.collect().tokens[: pending.popleft(), 0].tolist())
    return chosen


def traffic(seed, steps=20, **options):
    source = Traffic(np.random.default_rng(seed), **options)
    frames = [(frame, None) for frame in source.admissions()]
    frames += [source.step(number) for number in range(steps)]
    assert source.mixed > 2
    return frames


def reference():
    return ReferenceBackend(Device("cpu:0"), dtype="float64")


@pytest.mark.parametrize("form", ["exact", "static"])
@pytest.mark.parametrize("pads", [(0, 0), (2, 3)], ids=["tight", "padded"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_tokens_equal_the_reference(form, pads, bias, tiny_llama, backend):
    tiny = tiny_llama(3, bias=bias)
    frames = traffic(5, pads=pads)
    want = drive(tiny.runner(reference(), "float64", LIMITS), frames)
    chosen = backend if form == "exact" else StaticTorch()
    runner = tiny.runner(chosen, "float32", LIMITS)
    assert drive(runner, frames) == want
    runner.close()


@pytest.mark.parametrize("sampler", ["sample", "sample_filtered"])
def test_sampled_tokens_equal_the_reference(sampler, tiny_llama, backend):
    tiny = tiny_llama(4)
    frames = traffic(6, sampler=sampler)
    want = drive(tiny.runner(reference(), "float64", LIMITS), frames)
    assert drive(tiny.runner(backend, "float32", LIMITS), frames) == want


def first_logits(tiny, backend, dtype):
    loaded = tiny.load(backend, dtype)
    runner = tiny.runner(backend, dtype, LIMITS)
    tokens = [5, 3, 88, 0, 41, 96]
    bucket = Bucket(len(tokens), 1)
    frame = step_frame(
        bucket,
        [Row(1, tokens)],
        [BlockTableUpdate(0, 1, 0, 9), BlockTableUpdate(0, 1, 1, 4)],
        step=0,
        groups=1,
        block_size=BLOCK,
        decode_rows=0,
    )
    state = backend.state(loaded.model.state(loaded.config), limits=LIMITS)
    with torch.inference_mode():
        logits, _, _ = forward(
            runner.executor.ops(bucket),
            loaded.model,
            loaded.config,
            loaded.weights,
            backend.tensor(wrap(frame)),
            state,
        )
    return logits


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_logits_equal_the_reference(dtype, bound, tiny_llama, backend):
    tiny = tiny_llama(7)
    want = first_logits(tiny, reference(), "float64")
    got = first_logits(tiny, backend, dtype).double().numpy()
    assert np.abs(got - want).max() < bound * np.abs(want).max()


def test_a_step_never_synchronizes(tiny_llama, meta_backend):
    """Meta tensors have no data, so reading or branching on data raises."""
    deep = replace(LIMITS, depth=64)
    for sampler in SAMPLERS:
        runner = tiny_llama(3).runner(meta_backend, "float32", deep)
        for frame, _ in traffic(5, sampler=sampler):
            runner.submit(frame)


def test_a_captured_step_keeps_its_buffers(tiny_llama, backend):
    """A CUDA graph requires that the returned state is the state that was passed."""
    runner = tiny_llama(3).runner(backend, "float32", LIMITS)
    before = [x.data_ptr() for x in buffers(runner)]
    drive(runner, traffic(5))
    drive(runner, traffic(5, sampler="sample_filtered"))
    assert [x.data_ptr() for x in buffers(runner)] == before


def buffers(runner):
    state = runner.executor.state
    return [*leaves(state.caches)] + list(state.tables)


def test_the_comparison_can_fail(tiny_llama, backend):
    frames = traffic(5)
    want = drive(tiny_llama(3).runner(reference(), "float64", LIMITS), frames)
    other = tiny_llama(3, rope_theta=100.0)
    assert drive(other.runner(backend, "float32", LIMITS), frames) != want
