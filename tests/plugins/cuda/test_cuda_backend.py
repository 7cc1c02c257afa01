"""The CUDA backend; all but the first test need a GPU."""

from __future__ import annotations

import json
import os
import re
import signal

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from inl import EngineConfig
from inl.device import Device
from inl.dtypes import wrap
from inl.engine.core import EngineCore
from inl.errors import BackendUnavailable, InlError, OutOfMemory, WorkerLost
from inl.executor.model_loader import LanguageModel, open_model
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.runners.startup import start
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from inl_cuda import probe
from inl_cuda.backend import CudaBackend, check_torch


def skip_reason():
    try:
        probe.probe()
    except InlError as error:
        return str(error)
    return None if torch.cuda.is_available() else "torch is built without CUDA"


REASON = skip_reason()
cuda = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_torch_without_cuda_is_refused():
    with pytest.raises(BackendUnavailable, match=r"cuda:0: torch .* finds no usable"):
        CudaBackend(Device("cuda:0"))


@pytest.fixture
def gpu():
    return CudaBackend(Device("cuda:0"))


@cuda
def test_an_index_beyond_the_last_is_refused():
    with pytest.raises(BackendUnavailable, match="torch finds"):
        check_torch(Device("cuda:999"))


@cuda
def test_memory_counts_allocations(gpu):
    before = gpu.memory()
    held = gpu.tensor(wrap(np.zeros(1 << 24, np.float32)))
    after = gpu.memory()
    assert before.total == after.total
    assert before.total == pytest.approx(probe.probe()[0].memory_bytes, rel=0.02)
    assert before.free - after.free >= held.nbytes


@cuda
def test_float32_products_are_ieee(gpu):
    a = np.random.default_rng(1).standard_normal((2, 512, 512)).astype(np.float32)
    x, y = (gpu.tensor(wrap(part)) for part in a)
    exact = a[0].astype(np.float64) @ a[1].astype(np.float64)
    error = np.linalg.norm((x @ y).cpu().numpy() - exact) / np.linalg.norm(exact)
    assert error < 1e-5


@cuda
def test_oom_of_a_state(gpu):
    from inl.spec.cache import Paged

    limits = Limits(2, (1 << 24,), 16, 4, 97)
    with pytest.raises(OutOfMemory, match="do not fit"):
        gpu.state((Paged((0,), 8, 128, "float32"),), limits=limits)


@cuda
def test_oom_of_a_step_and_recovery(gpu):
    def greedy(_weights, message, state):
        if int(message[0]):
            torch.empty(1 << 42, device=message.device)
        return message + 1, state

    program = gpu.compile(greedy, None, consumes=(2,))
    frame = gpu.tensor(wrap(np.ones(1, np.int32)))
    with pytest.raises(OutOfMemory, match=r"GiB more does not fit, \d+ bytes are free"):
        program((), frame, ())
    result, _ = program((), frame * 0, ())
    assert result.tolist() == [1]


@cuda
def test_a_bucket_is_one_graph(gpu):
    calls = []

    def step(weights, message, state):
        calls.append(1)
        return message + weights[0], state

    program = gpu.compile(step, Bucket(1, 1), consumes=(2,))
    weights = (gpu.tensor(wrap(np.full(3, 5, np.int32))),)
    for number in (1, 2, 3):
        frame = gpu.tensor(wrap(np.full(3, number, np.int32)))
        arrived, _ = program(weights, frame, ())
        assert gpu.numpy(arrived).data.tolist() == [number + 5] * 3
    assert len(calls) == 2  # one to warm up, one to capture


@cuda
@pytest.mark.parametrize("failing", [1, 2], ids=["warming up", "capturing"])
def test_oom_of_a_capture_and_recovery(gpu, failing):
    calls = []

    def step(weights, message, state):
        calls.append(1)
        result = message + weights[0]
        if len(calls) == failing:
            torch.empty(1 << 42, device=message.device)
        return result, state

    program = gpu.compile(step, Bucket(1, 1), consumes=(2,))
    weights = (gpu.tensor(wrap(np.full(3, 5, np.int32))),)
    frame = gpu.tensor(wrap(np.full(3, 2, np.int32)))
    with pytest.raises(OutOfMemory, match=r"step of 1 tokens: 16384.00 GiB more"):
        program(weights, frame, ())
    for _ in range(2):
        arrived, _ = program(weights, frame, ())
        assert gpu.numpy(arrived).data.tolist() == [7] * 3


@cuda
def test_an_engine_survives_oom_of_a_step(gpu):
    """The allocator's limit is set to what is reserved, then removed."""
    sizes = {"hidden": 128, "head_dim": 16, "inner": 4096, "vocab": 256}
    tiny = tiny_llama(np.random.default_rng(3), **sizes)
    language = LanguageModel(MODEL, MODEL.config(tiny[0]), MemoryCheckpoint(*tiny))
    config = EngineConfig(
        backend="cuda:0", dtype="float32", context=256, cache_bytes=1 << 24
    )
    core = EngineCore(start_runner(language, gpu, config))
    want = answered(core, [4, 88, 17], 8)
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), gpu.memory().total
    torch.cuda.set_per_process_memory_fraction(reserved / total)
    try:
        long = Request(range(200), max_tokens=2)
        core.add(long)
        errors = [event.error for event in ended(core) if event.error]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [type(error) for error in errors] == [OutOfMemory]
    assert re.search(r"step of \d+ tokens: .* does not fit", str(errors[0]))
    assert answered(core, [4, 88, 17], 8) == want
    logits = plain_logits(*tiny, [*range(200)])
    assert answered(core, range(200), 1) == [int(logits[-1].argmax())]
    core.runner.close()


def ended(core):
    while core.has_work:
        yield from core.step()


def answered(core, ids, count):
    request = Request(ids, max_tokens=count)
    core.add(request)
    assert not [event.error for event in ended(core) if event.error]
    return request.output_ids


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_logits_of_float64(tmp_path):
    tiny = tiny_llama(np.random.default_rng(5), hidden=64, head_dim=16, kv_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(tiny[0]))
    save_file(tiny[1], tmp_path / "model.safetensors")
    config = EngineConfig(
        backend="cuda:0", tensor_parallel=2, dtype="float32", context=128,
        cache_bytes=1 << 24, worker_seconds=120,
    )  # fmt: skip
    core = EngineCore(start(open_model(tmp_path), config).runner)
    prompts = [[5, 17, 80, 3, 44, 9], [61], [7, 12, 90, 33] * 7]
    requests = [Request(ids, max_tokens=24, logprobs=20) for ids in prompts]
    for request in requests:
        core.add(request)
    assert not [event.error for event in ended(core) if event.error]
    for request in requests:
        exact = plain_logits(*tiny, request.tokens[:-1])[-24:]
        exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
        assert request.output_ids == list(exact.argmax(-1))
        for row, found in zip(exact, request.token_logprobs, strict=True):
            assert max(abs(row[token] - value) for token, value in found.top) < 1e-4
    core.add(Request(prompts[0], max_tokens=100))
    core.step()
    os.kill(core.runner.runners[1].pid, signal.SIGKILL)
    (error,) = [event.error for event in ended(core) if event.error]
    assert isinstance(error, WorkerLost)
    assert "rank 1 of 2 failed" in str(error)
    core.runner.close()
