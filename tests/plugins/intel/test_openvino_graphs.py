"""Parts of OpenVINO's graphs against float64, on its CPU device; refused settings."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest

from inl.checkpoints.blocks.codes import SPLIT
from inl.device import Device
from inl.dtypes import HostArray
from inl.errors import BackendUnavailable, DeviceError, OutOfMemory, RequestError
from inl.ops.attention import attention, random_step
from inl.ops.cache import write_kv
from inl.ops.step import empty_tables
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.limits import Limits
from inl_intel.openvino import gathered, paged
from inl_intel.openvino.backend import OpenVinoBackend
from inl_intel.openvino.compiled import CompiledModel
from inl_intel.openvino.kernels import product
from inl_intel.openvino.runtime import Runtime, core
from inl_intel.openvino.single import SingleGraph, evaluated
from inl_intel.openvino.weights import codes_of
from quantized_blocks import SIZES, decoded

DEVICE = Device("xpu:0")
ROWS = {
    "decode": ([5, 0, 70, 33], [1, 1, 1, 1]),
    "prompt": ([0], [45]),
    "mixed": ([3, 40, 0, 31], [1, 1, 37, 3]),
}
"""Name -> cached and new tokens of each row."""
HEADS, KV_HEADS, DIM = 6, 2, 16
BLOCK_SIZE = paged.BLOCK_SIZE


@pytest.fixture(scope="module")
def runtime():
    return Runtime("CPU", "float32")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("form", ["paged", "gathered", "gathered with a cap"])
def test_attention_is_that_of_the_body(form, window, rows, runtime):
    rng = np.random.default_rng(7)
    step, blocks = random_step(
        rng, *ROWS[rows], block_size=BLOCK_SIZE, pad_rows=2, pad_tokens=3
    )
    used = int(step.used_counts[2])
    q = rng.standard_normal((len(step.tokens), HEADS, DIM))
    k, v = rng.standard_normal((2, len(step.tokens), KV_HEADS, DIM))
    cache = Cache(*rng.standard_normal((2, blocks, BLOCK_SIZE, KV_HEADS, DIM)))
    options = {"scale": 0.3, "window": window, "group": 0}
    options["cap"] = 2.0 if form.endswith("cap") else None
    found, after = attended(form, q, k, v, cache, step, options, runtime)
    written = write_kv.body(k, v, cache, step.writes[0])
    expected = attention.body(q, written, step, **options)[:used]
    assert np.abs(found[:used] - expected).max() < 2e-5
    for own, part in zip(after, written[:2], strict=True):
        cells = step.writes[0][:used]
        flat = part.reshape(-1, KV_HEADS, DIM)[cells]
        assert np.array_equal(own.reshape(-1, KV_HEADS, DIM)[cells], flat.astype("f"))


def attended(form, q, k, v, cache, step, options, runtime):
    """The output of one layer [T, heads, dim], and its cache in the core's layout."""
    is_paged = form == "paged"
    graph = paged.PagedGraph() if is_paged else gathered.GatheredGraph(step)
    carry = tuple(x.astype(np.float32) for x in (q, k, v))
    values = [graph.input(f"carry.{i}", x) for i, x in enumerate(carry)]
    out = graph.attend(*values, layer=0, **options)
    module = paged if is_paged else gathered
    make = module.PagedModel if is_paged else module.GatheredModel
    model: CompiledModel = make(graph, out, runtime)
    count = cache.k.shape[0]
    group = Paged((0,), KV_HEADS, DIM, "float32")
    pages = module.Pages(group, count, limits(blocks=(count,)))
    parts = {}
    for name in "kv":
        values = getattr(cache, name)
        if is_paged:
            tensor = pages.tensor(name, model.compiled.input(f"{name}.0"), runtime)
            tensor.data[...] = values.transpose(0, 2, 1, 3)
            parts[name] = tensor.data.transpose(0, 2, 1, 3)
        else:
            parts[name] = getattr(pages, name)
            parts[name][...] = values
    found = model(carry, step, State((pages,), {}, None))
    return found, [parts[name] for name in "kv"]


def limits(**changes):
    fields = {"slots": 3, "blocks": (9,), "block_size": BLOCK_SIZE}
    fields |= {"max_blocks_per_seq": 4, "vocab": 64}
    return Limits(**{**fields, **changes})


@pytest.mark.parametrize("dtype", SPLIT)
def test_products_with_codes_are_those_of_the_decoded_matrix(dtype, runtime):
    rng = np.random.default_rng(3)
    matrix = stored(rng, dtype, 24, 96)
    x = rng.standard_normal((5, 96)).astype(np.float32)
    codes = codes_of(matrix)
    assert codes.shape == (24, 96)
    found = evaluated(lambda x: product(x, codes), runtime, (x,), {})
    expected = x.astype(np.float64) @ decoded(matrix).reshape(24, 96).T
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["q4_1", "q5_1"])
def test_a_group_of_one_number_is_not_lost(dtype, runtime):
    """Its scale is 0 and its offset is not."""
    matrix = stored(np.random.default_rng(5), dtype, 4, 64)
    blocks = matrix.data.reshape(8, SIZES[dtype])
    blocks[3, :2] = 0
    x = np.eye(64, dtype=np.float32)
    codes = codes_of(matrix)
    found = evaluated(lambda x: product(x, codes), runtime, (x,), {})
    expected = decoded(matrix).reshape(4, 64).T
    assert np.abs(found - expected).max() < 1e-5


def test_compressed_weights_stay_compressed(runtime):
    """The plugin multiplies with codes of 4 bits, and decodes no matrix before."""
    graph = SingleGraph()
    x = graph.input("x", np.zeros((2, 64), np.float32))
    matrix = codes_of(stored(np.random.default_rng(1), "q4_1", 32, 64))
    compiled = runtime.compile(graph, product(x, matrix))
    nodes = compiled.get_runtime_model().get_ops()
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in nodes]
    assert "FullyConnected" in kinds
    assert not {"Subtract", "Multiply", "Eltwise", "MatMul"} & set(kinds)


def stored(rng, dtype, rows, columns):
    """A matrix of random codes with scales and offsets near 1."""
    groups = rows * columns // 32
    blocks = rng.integers(0, 256, (groups, SIZES[dtype]), np.uint8)
    for at in (0, 2) if dtype.endswith("_1") else (0,):
        numbers = rng.uniform(0.5, 1.5, groups).astype(np.float16)
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    return HostArray(blocks.reshape(rows, -1), dtype, (rows, columns))


def test_the_first_axis_is_that_of_the_tokens():
    x = SingleGraph().input("x", np.zeros((4, 6), np.float32))
    assert x.reshape(4, -1, 3).shape == (4, 2, 3)
    assert x[:, 2:4].shape == x[..., 2:4].shape == (4, 2)
    with pytest.raises(DeviceError, match="the first axis is that of the tokens"):
        x.reshape(2, 12)
    with pytest.raises(DeviceError, match="behind the first only"):
        x[1:]
    with pytest.raises(TypeError, match="combined with str"):
        x * "2"
    with pytest.raises(DeviceError, match="y: found float64, accepts float32, int32"):
        x.graph.input("y", np.zeros(2))


@pytest.mark.parametrize("pages", [True, False])
def test_what_no_graph_serves_is_refused(pages):
    backend = OpenVinoBackend(DEVICE, name="CPU", pages=pages)
    cache = Paged((0,), KV_HEADS, DIM, "float32")
    with pytest.raises(RequestError, match=r"keeps 'velocity' for each sequence"):
        backend.state((cache, Slotted("velocity", (4,), "float32", "replay")),
                      limits=limits())  # fmt: skip
    with pytest.raises(RequestError, match=r"max_adapters: found 2, .* accepted: 0"):
        backend.state((cache,), limits=limits(adapters=2, adapter_rank=4))
    with pytest.raises(RequestError, match=r"blocks of 16 tokens, .* accept 32"):
        backend.state((cache,), limits=limits(block_size=16))
    state = backend.state((cache,), limits=limits())
    assert len(state.caches) == 1
    shapes = [table.shape for table in state.tables]
    tables = empty_tables(groups=1, slots=3, max_blocks_per_seq=4, vocab=64)
    assert shapes == [table.shape for table in tables]


def test_an_absent_device_is_refused():
    with pytest.raises(BackendUnavailable, match=r"finds no device NPU: found CPU"):
        OpenVinoBackend(DEVICE, name="NPU")


def test_a_setting_for_threads_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("INL_THREADS", "two")
    with pytest.raises(DeviceError, match="INL_THREADS: found 'two', accepted: a"):
        Runtime("CPU", "float32").settings()


def test_a_graph_that_a_device_refuses_names_both(monkeypatch, runtime):
    def refusing(*_):
        raise RuntimeError("Exception from core.cpp:1:\nunsupported operation Add\n\n")

    graph = SingleGraph()
    x = graph.input("x", np.zeros((1, 2), np.float32))
    # Only Python's wrapper of the registry can be patched.
    monkeypatch.setattr(type(core()), "compile_model", refusing)
    with pytest.raises(BackendUnavailable, match=r"CPU .* unsupported operation"):
        runtime.compile(graph, x + x)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_cache_that_does_not_fit_is_reported(kind, runtime):
    assert runtime.zeros((2, 3), getattr(ov.Type, kind)).shape == [2, 3]
    with pytest.raises(OutOfMemory, match="CPU: cache of "):
        runtime.zeros((1 << 40, 1 << 12), getattr(ov.Type, kind))
