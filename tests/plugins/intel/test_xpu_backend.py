"""The XPU backend on the simulated device: choice of kernels, memory, no float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simulated_xpu import MODULE, open_backend
from torch.utils._python_dispatch import TorchDispatchMode

from inl.backend.base import CachedMemory
from inl.device import Device
from inl.engine.core import EngineCore
from inl.errors import BackendUnavailable, DeviceError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.runners.local_runner import start_runner
from inl.scheduling.request import Request
from inl.spec.tolerance import judge
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from inl_intel import backend as module
from inl_intel import rope
from inl_intel.backend import XpuBackend
from inl_intel.settings import KERNELS, requested_kernels
from inl_intel.tuning import WIDE_ONLY
from inl_torch.eager import rope as eager_rope

DEVICE = Device("xpu:0")


def changed(**functions):
    return SimpleNamespace(**(vars(MODULE) | functions))


class NoFloat64(TorchDispatchMode):
    """Raises for every tensor of float64, which Arc GPUs do not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else (result,)
        for each in found:
            if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                raise TypeError(f"{func} returns float64")
        return result


@pytest.fixture
def answers():
    """Function: greedy answers of a tiny model, and those of plain float64."""
    from inl.config import EngineConfig

    def make(backend):
        tiny = tiny_llama(np.random.default_rng(5), hidden=64, head_dim=16)
        language = LanguageModel(MODEL, MODEL.config(tiny[0]), MemoryCheckpoint(*tiny))
        config = EngineConfig(
            backend="xpu:0", dtype="float32", context=64, cache_bytes=1 << 22
        )
        core = EngineCore(start_runner(language, backend, config))
        request = Request([5, 17, 80, 3], max_tokens=8)
        core.add(request)
        while core.has_work:
            assert not [event.error for event in core.step() if event.error]
        core.runner.close()
        exact = plain_logits(*tiny, request.tokens[:-1])[-8:]
        return list(request.output_ids), list(exact.argmax(-1))

    return make


def test_a_request_computes_nothing_in_float64(answers):
    rope.plane_turns.cache_clear()
    with NoFloat64():
        found, exact = answers(open_backend(DEVICE))
    assert found == exact


def test_float64_is_found(answers, monkeypatch):
    """With the angles of the eager kernel the mode above raises."""
    eager_rope.plane_frequencies.cache_clear()
    monkeypatch.setattr(rope, "KERNELS", ())
    with NoFloat64(), pytest.raises((TypeError, AssertionError), match="float64"):
        answers(open_backend(DEVICE))


def test_the_rotation_table_is_exact_at_every_position():
    spec = catalog()["rope_table"]
    for case in spec.cases(np.random.default_rng(1)):
        positions = torch.from_numpy(np.asarray(case.args[0]))
        got = [x.numpy() for x in rope.rope_table(positions, **case.attrs)]
        verdict = judge(spec, case, "float32", tuple(got))
        assert verdict.passed, f"{case.name}: {verdict}"


@pytest.mark.parametrize("position", [1, 4095, (1 << 20) - 1, (1 << 31) - 1])
def test_angles_of_long_contexts(position):
    from inl.ops.rope import RopeScaling, frequencies

    angles = frequencies(64, 1e4, RopeScaling()) * position
    cos, sin = rope.rope_table(
        torch.tensor([position], dtype=torch.int32),
        dim=64, theta=1e4, scaling=RopeScaling(),
    )  # fmt: skip
    assert np.abs(cos[0].numpy() - np.cos(angles)).max() < 5e-7
    assert np.abs(sin[0].numpy() - np.sin(angles)).max() < 5e-7


def test_memory_counts_what_torch_has_cached_as_free():
    gpu = XpuBackend(
        DEVICE,
        changed(
            mem_get_info=lambda _: (100, 1000),
            memory_reserved=lambda _: 50,
            memory_allocated=lambda _: 20,
        ),
        "cpu",
    )
    assert gpu.memory() == (1000, 130)


def test_memory_of_a_gpu_that_does_not_report_it():
    def refuse(_place):
        raise RuntimeError("the device does not support querying free memory")

    gpu = XpuBackend(DEVICE, changed(mem_get_info=refuse), "cpu")
    assert gpu.memory() == (1 << 30, 1 << 30)


def test_an_out_of_memory_step_empties_the_devices_cache():
    emptied = []
    module = changed(empty_cache=lambda: emptied.append(1))
    gpu = XpuBackend(DEVICE, module, "cpu")

    def step(*_):
        raise RuntimeError("XPU out of memory. Tried to allocate 2 GiB")

    with pytest.raises(Exception, match=r"2 GiB more does not fit"):
        gpu.compile(step, None, consumes=())()
    assert emptied == [1]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"is_available": lambda: False}, "finds no usable Intel GPU"),
        ({"device_count": lambda: 0}, "torch finds 0 XPU devices"),
    ],
)
def test_unusable_torch_is_refused(functions, message):
    with pytest.raises(BackendUnavailable, match=message):
        XpuBackend(DEVICE, changed(**functions), "cpu")


@pytest.mark.skipif(torch.xpu.is_available(), reason="torch finds an Intel GPU")
def test_this_build_of_torch_is_refused():
    with pytest.raises(BackendUnavailable, match=r"xpu:0: torch .* for XPU is needed"):
        XpuBackend(DEVICE)


@pytest.mark.parametrize(
    ("kind", "value", "uses"),
    [("xpu", "", True), ("xpu", "torch", False), ("cpu", "", False)],
)
def test_triton_is_used_on_gpus_unless_declined(monkeypatch, kind, value, uses):
    monkeypatch.setenv(KERNELS, value)
    monkeypatch.setattr(module, "has_triton", lambda: True)
    assert XpuBackend(DEVICE, MODULE, kind).uses_triton() == uses


@pytest.mark.parametrize(("lanes", "uses"), [([8, 16, 32], False), ([16, 32], True)])
def test_gpus_of_few_registers_leave_products_to_torch(monkeypatch, lanes, uses):
    """Those of Arc A have half the bytes of Arc B's, and a sub-group of 8 lanes."""
    pytest.importorskip("triton")
    monkeypatch.delenv(KERNELS, raising=False)
    facts = SimpleNamespace(gpu_subslice_count=32, sub_group_sizes=lanes)
    gpu = changed(get_device_properties=lambda _: facts)
    kernels = list(XpuBackend(DEVICE, gpu, "xpu").kernels())
    fused = {each.op for each in kernels if "/triton" in each.label}
    assert fused >= {"rms_norm", "sample", "make_step", "write_kv"}
    assert ("linear" in fused, "attention" in fused) == (uses, uses)
    assert {each.op for each in kernels} >= WIDE_ONLY & {"linear", "attention"}


def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setenv(KERNELS, "ipex")
    with pytest.raises(DeviceError, match=r"found 'ipex', accepted: triton, torch"):
        requested_kernels()


def test_closing_a_runner_empties_the_devices_cache():
    emptied = []
    module = changed(empty_cache=lambda: emptied.append(1))
    offer = XpuBackend(DEVICE, module, "meta").offers(CachedMemory)
    assert offer is not None
    offer.release()
    assert emptied == [1]
    assert XpuBackend(DEVICE, module, "cpu").offers(CachedMemory) is None
