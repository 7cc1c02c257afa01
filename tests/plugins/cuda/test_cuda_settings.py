"""Environment variables of the CUDA backend."""

from __future__ import annotations

import pytest

from inl.backend.base import PackedKernels
from inl.backend.provisional import DecodedBlocks, WeightCopies
from inl.errors import DeviceError
from inl_cuda.settings import (
    PERSISTENT,
    WEIGHTS,
    has_persistent_steps,
    requested_weights,
)


@pytest.mark.parametrize(
    ("given", "found"), [(None, ""), ("", ""), ("dense", "dense"), ("packed", "packed")]
)
def test_requested_weights(monkeypatch, given, found):
    monkeypatch.delenv(WEIGHTS, raising=False)
    if given is not None:
        monkeypatch.setenv(WEIGHTS, given)
    assert requested_weights() == found


def test_an_unknown_value_is_refused(monkeypatch):
    monkeypatch.setenv(WEIGHTS, "tight")
    with pytest.raises(DeviceError, match=r"found 'tight', accepted: dense, packed"):
        requested_weights()


@pytest.mark.parametrize("given", [None, "", "0", "1", "yes"])
def test_has_persistent_steps(monkeypatch, given):
    monkeypatch.delenv(PERSISTENT, raising=False)
    if given is not None:
        monkeypatch.setenv(PERSISTENT, given)
    if given == "yes":
        with pytest.raises(DeviceError, match=r"found 'yes', accepted: 0, 1"):
            has_persistent_steps()
    else:
        assert has_persistent_steps() == (given != "0")


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("given", ["", "dense", "packed"])
def test_models_quantized_while_loading_are_packed_by_default(
    monkeypatch, given, hopper
):
    """Without a GPU: the backend is not opened."""
    pytest.importorskip("triton")
    from inl_cuda.backend import CudaBackend
    from inl_torch.gpu.backend import GpuBackend
    from inl_torch.triton.tuning import Tuning

    monkeypatch.setenv(WEIGHTS, given)
    monkeypatch.setattr(CudaBackend, "tuning", lambda _: Tuning(processors=1))
    monkeypatch.setattr(CudaBackend, "_multiplies_float8", lambda _: hopper)
    monkeypatch.setattr(CudaBackend, "_is_hopper", lambda _: False)
    monkeypatch.setattr(GpuBackend, "kernels", lambda _: ())
    monkeypatch.setattr(GpuBackend, "offers", lambda *_: None)
    backend = object.__new__(CudaBackend)
    offered = backend.offers(PackedKernels)
    kernels = list(offered.kernels()) if offered else []
    packed = {"packed", "int4_chunks"} if hopper else {"packed"}
    assert {kernel.layout for kernel in kernels} == (set() if given else packed)
    blocks = backend.offers(DecodedBlocks)
    assert (blocks.dtype if blocks else "") == (
        "fp8_128" if hopper and given != "dense" else ""
    )
    copies = backend.offers(WeightCopies)
    assert bool(copies) == hopper
    if copies:
        names = {(each.op, each.name, each.layout) for each in copies.kernels()}
        four = [each for each in backend._packed_kernels()
                if each.layout == "int4_chunks"]  # fmt: skip
        assert names == {(each.op, each.name, each.layout) for each in four}
    own = {kernel.layout for kernel in backend.kernels()}
    rows = {"float8_rows"} if hopper and given != "dense" else set()
    assert own == rows | (packed if given == "packed" else set())
