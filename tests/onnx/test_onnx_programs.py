"""Exported programs of a tiny Llama: their graphs, buffers and tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.dtypes import wrap
from inl.errors import DeviceError, OutOfMemory
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.spec.message import POOLED
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.testing.play import admission, one_step
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play
from inl_onnx.graph import Graph
from inl_onnx.trace import export, in_place
from onnx_cpu import CPU, OnnxCpu

LAYERS = 2
LIMITS = Limits(
    slots=8,
    blocks=(83,),
    block_size=4,
    max_blocks_per_seq=12,
    vocab=96,
    sampler="greedy",
)


@pytest.fixture(scope="module")
def files():
    sizes = {"layers": LAYERS, "kv_heads": 2}
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(11), **sizes))


@pytest.fixture(scope="module")
def runner(onnx_backend, files):
    return local_runner(onnx_backend, MODEL, files, LIMITS)


def exported(runner, bucket):
    executor = runner.executor
    body = executor._body("advance", bucket, None)
    message = executor.dummy_message(bucket)
    return export(body, (executor.loaded.weights, message, executor.state), {})


def test_pooled_steps_give_the_hidden_states_of_float64(onnx_backend, files):
    exact = ReferenceBackend(Device("reference"), dtype="float64")
    found = []
    for backend, dtype in ((onnx_backend, "float32"), (exact, "float64")):
        one = local_runner(backend, MODEL, files, LIMITS, dtype=dtype)
        for slot in (1, 2):
            one.submit(admission(one.limits, slot, [2 * slot - 1, 2 * slot]))
        parts = [(1, [5, 6, 7, 8, 9]), (2, [3, 4, 1])]
        one.submit(one_step(one.limits, parts, step=1, decoding=0, flags=POOLED))
        found.append(one.collect().hidden[:2])
    assert np.abs(found[0] - found[1]).max() < 2e-5
    assert np.abs(found[1]).max() > 0.1


@pytest.mark.parametrize("bucket", [Bucket(1, 1), Bucket(7, 7), Bucket(64, 7)])
def test_a_program_is_valid_onnx_and_replaces_cache_entries_only(runner, bucket):
    found = exported(runner, bucket)
    onnx.checker.check_model(found.model, full_check=True)
    caches = list(leaves(runner.executor.state.caches))
    shapes = [cache.shape for cache in caches]
    shared = [each for each in found.outputs if each.name and each.argument >= 0]
    assert sum(each.shape in shapes for each in shared) == len(caches) == 2 * LAYERS
    made = {node.output[0]: node.op_type for node in found.model.graph.node}
    assert {made[each.name] for each in shared} == {"ScatterND"}


def test_a_step_writes_over_the_cache_and_takes_the_old_tensors(runner):
    executor = runner.executor
    before = list(leaves(executor.state.caches))
    addresses = [cache.value.data_ptr() for cache in before]
    executor.advance(Bucket(1, 1), executor.dummy_message(Bucket(1, 1)))
    after = list(leaves(executor.state.caches))
    assert [cache.value.data_ptr() for cache in after] == addresses
    for cache in before:
        with pytest.raises(DeviceError, match="was consumed"):
            _ = cache.value


def test_a_provider_that_cannot_write_in_place_gets_new_buffers(files):
    backend = OnnxCpu(CPU._replace(in_place=False))
    runner = local_runner(backend, MODEL, files, LIMITS)
    executor = runner.executor
    before = list(leaves(executor.state.caches))
    old = [cache.value for cache in before]
    executor.advance(Bucket(1, 1), executor.dummy_message(Bucket(1, 1)))
    after = [cache.value.data_ptr() for cache in leaves(executor.state.caches)]
    assert not set(after) & {value.data_ptr() for value in old}


@pytest.mark.parametrize("late", [False, True])
def test_a_buffer_is_shared_only_if_its_old_content_was_read_before(late):
    """``late``: a node reads the argument, and the replacement does not wait for it."""
    graph = Graph()
    table = graph.input("table", "float32", (4,))
    at = graph.input("at", "int64", (1, 1))
    old = table.node("Gather", at, shape=(1, 1), axis=0).reshape(1)
    new = table.node("ScatterND", at, graph.constant([1.0], "float32") if late else old)
    assert in_place(graph, [new, old], {"table": 0}) == ({} if late else {new.name: 0})


@pytest.mark.parametrize("sampler", ["greedy", "sample_filtered"])
def test_tokens_equal_the_float64_reference(onnx_backend, files, sampler):
    limits = replace(LIMITS, sampler=sampler)
    runner = local_runner(onnx_backend, MODEL, files, limits)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    reference = local_runner(exact, MODEL, files, limits, dtype="float64")

    def texts(which):
        rng = np.random.default_rng(4)
        return play(which, Traffic(rng, runner.limits, sampler=sampler).frames(40))

    found = texts(runner)
    assert sum(map(len, found.values())) > 50
    assert found == texts(reference)


def test_a_host_copy_outlives_its_tensor(onnx_backend):
    data = np.arange(1000, dtype=np.float32)
    tensor = onnx_backend.tensor(wrap(data))
    data[:] = 0
    copy = onnx_backend.numpy(tensor).data
    (tensor + 1).consume()
    tensor.value.update_inplace(np.zeros(1000, np.float32))
    assert (copy == np.arange(1000)).all()


def test_tensors_have_the_operators_of_the_contract(onnx_backend):
    x = onnx_backend.tensor(wrap(np.arange(6, dtype=np.float32).reshape(2, 3)))
    y = (2 - (x + x) * x).reshape(3, 2)[1:, 0]
    assert onnx_backend.numpy(y).data.tolist() == [-6.0, -30.0]


def test_a_dtype_that_the_runtime_lacks_is_refused(onnx_backend):
    with pytest.raises(DeviceError, match="found 'int16', ONNX Runtime takes float32"):
        onnx_backend.tensor(wrap(np.zeros(2, np.int16)))


def test_a_failed_allocation_is_out_of_memory(runner, monkeypatch):
    executor = runner.executor
    bucket = Bucket(1, 1)
    executor.advance(bucket, executor.dummy_message(bucket))
    state = executor.state

    def fail(*_):
        raise RuntimeError("Failed to allocate memory for requested buffer of size 9")

    monkeypatch.setattr(ort.InferenceSession, "run_with_iobinding", fail)
    with pytest.raises(OutOfMemory, match="size 9"):
        executor.advance(bucket, executor.dummy_message(bucket))
    assert executor.state.caches == state.caches
