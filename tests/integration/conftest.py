"""The scaffold of a traced backend, and devices of tensors, as fixtures."""

import pytest

from inl import Device
from traced import jax_module as jax_module


@pytest.fixture(params=["reference", "cpu", "torch", "jax"])
def tensor_device(request, monkeypatch):
    """A device; torch and JAX stand behind the names that no plugin serves here."""
    place = pytest.importorskip("inl_toolkit.nn.place")
    place.place_of.cache_clear()
    if request.param in ("reference", "cpu"):
        yield Device(request.param)
        return
    if request.param == "torch":
        backend = pytest.importorskip("inl_cpu.torch_backend").TorchCpuBackend
    else:
        backend = request.getfixturevalue("jax_module").jax_backend()
    monkeypatch.setattr(place, "make_backend", backend)
    yield Device(f"{request.param}_here")
    place.place_of.cache_clear()
