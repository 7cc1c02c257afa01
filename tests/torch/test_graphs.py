"""A decoding step as a CUDA graph; most tests need a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import final

import pytest
import torch

from inl.backend.base import DeviceMemory, Traits
from inl.device import Device
from inl.errors import KernelFailed
from inl.spec.limits import Limits
from inl.spec.message import Row, TokenBias, admit_frame, step_frame, token_bias_frame
from inl.spec.step import Bucket
from inl_torch.backend import TorchBackend, inference_mode
from inl_torch.gpu.graphs import AsyncHostCopy, addresses, capture

LIMITS = Limits(slots=3, blocks=(20,), block_size=4, max_blocks_per_seq=8, vocab=97)
cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device"
)


@final
class GraphBackend(TorchBackend):
    traits = Traits()

    def __init__(self, *, spoiled=False):
        self.device = Device("cuda:0")
        self.place = torch.device("cuda", 0)
        self.spoiled = spoiled

    def memory(self):
        free, total = torch.cuda.mem_get_info(self.place)
        return DeviceMemory(total, free)

    def numpy(self, x):
        return super().numpy(x.wait() if isinstance(x, AsyncHostCopy) else x)

    def kernels(self):
        for kernel in super().kernels():
            yield (
                replace(kernel, run=write_to_copy)
                if self.is_spoiled(kernel)
                else kernel
            )

    def is_spoiled(self, kernel):
        return self.spoiled and kernel.op == "write_kv"

    def compile(self, function, bucket, *, consumes, info):
        if bucket is not None and bucket[:3] == (1, 1, 1) and consumes == (2,):
            return capture(function)
        return inference_mode(function)


def write_to_copy(k, v, cache, writes):
    """Write to a copy, which a captured graph does not support."""
    cache = cache._replace(k=cache.k.clone())
    cells = writes.long()
    cache.k.flatten(0, 1).index_copy_(0, cells, k)
    cache.v.flatten(0, 1).index_copy_(0, cells, v)
    return cache


@cuda
def test_threads_capture_while_others_use_the_device():
    """As engines of several models do; each allocates, waits and replays."""
    place = torch.device("cuda", 0)
    errors = []

    def scale(weights, message, state):
        return message * weights, state

    def run(number):
        try:
            state = torch.zeros(4, device=place)
            for size in range(1, 20):
                weights = torch.full((1000 * size,), float(number), device=place)
                program = capture(scale)
                for _ in range(5):
                    host, _ = program(weights, torch.ones(1000 * size), state)
                    torch.empty(1 << 20, device=place).fill_(1).sum().item()
                    assert (host.wait() == number).all()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert not errors


PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
FILTERS = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def decode(runner, prompt, count, sampler="greedy"):
    """Two steps in flight, each token fed back on the device."""
    table = [5, 2, 9, 14, 1, 7, 3, 11]
    params = {**PENALTIES, **FILTERS} if sampler == "sample_filtered" else {}
    runner.submit(admit_frame(1, [table], groups=1, max_blocks_per_seq=8, **params))
    if params:
        marks = [TokenBias(token, 1, -0.25) for token in sorted({*prompt})]
        runner.submit(token_bias_frame(1, marks))
    tokens = []
    for step in range(count):
        ids = [-1] if step else prompt
        if step > 1:
            tokens.append(int(runner.collect().tokens[0, 0]))
        frame = step_frame(
            Bucket(len(ids), 1, 1, sampler),
            [Row(1, ids, [(7 * step % 16) / 16])],
            step=step,
            groups=1,
            block_size=4,
            decode_rows=int(step > 0),
        )
        runner.submit(frame)
    return [*tokens, *(int(runner.collect().tokens[0, 0]) for _ in range(2))]


@cuda
@pytest.mark.parametrize("sampler", ["greedy", "sample_filtered"])
def test_a_captured_step_gives_the_same_tokens(sampler, tiny_llama, backend):
    tiny, prompt = tiny_llama(3), [4, 88, 17, 3, 61]
    want = decode(tiny.runner(backend, "float32", LIMITS), prompt, 24, sampler)
    runner = tiny.runner(GraphBackend(), "float32", LIMITS)
    assert decode(runner, prompt, 24, sampler) == want
    # Again with the captured graph, from another state of the tables.
    assert decode(runner, prompt, 24, sampler) == want


@cuda
def test_a_step_that_returns_other_buffers_is_refused(tiny_llama):
    runner = tiny_llama(3).runner(GraphBackend(spoiled=True), "float32", LIMITS)
    with pytest.raises(KernelFailed, match="write in place"):
        decode(runner, [4, 88, 17], 4)


@cuda
def test_other_weights_are_refused():
    place = torch.device("cuda", 0)
    state = (torch.zeros(2, device=place),)
    program = capture(lambda w, m, s: (w[0] + m, s))
    message = torch.ones(2, device=place)
    weights = (torch.ones(2, device=place),)
    assert program(weights, message, state)[0].wait().tolist() == [2, 2]
    with pytest.raises(KernelFailed, match="other weights or another state"):
        program((torch.ones(2, device=place),), message, state)
    with pytest.raises(KernelFailed, match="other weights or another state"):
        program(weights, message, (torch.zeros(2, device=place),))


@cuda
def test_a_result_arrives_while_later_work_runs():
    tensor = torch.arange(5, device="cuda")
    arriving = AsyncHostCopy(tensor)
    tensor.zero_()
    assert arriving.wait().tolist() == [0, 1, 2, 3, 4]


def test_addresses_distinguish_buffers():
    a, b = torch.zeros(2), torch.zeros(2)
    assert addresses({"x": (a, None), "y": a[1:]}) == addresses((a, a[1:]))
    assert addresses((a,)) != addresses((b,))
