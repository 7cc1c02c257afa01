"""The scaffold of a traced backend, imported as the package ``inl_traced``."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl.testing.scaffold import create


def load(folder):
    """Create the package in ``folder`` and return what its modules define.

    ``jax_backend(replaced=None, compile=jit)`` makes its backend class; tests plant
    their faults through ``replaced`` kernels.
    """
    package = create("traced", folder, style="traced")
    sys.path.insert(0, str(package / "src"))
    try:
        from inl_traced import backend, kernels
    finally:
        sys.path.pop(0)

    def jit(function, bucket, consumes):
        return backend.jax.jit(function, donate_argnums=tuple(consumes))

    def jax_backend(*, replaced=None, compile=jit):  # noqa: A002
        runs = {**kernels.KERNELS, **(replaced or {})}
        return simple_backend(
            tensor=backend.tensor,
            numpy=backend.numpy,
            kernels=lambda: [Kernel(name, "jax", runs[name]) for name in runs],
            compile=compile,
            buckets=backend.buckets,
            traits=backend.Backend.traits,
        )

    return SimpleNamespace(
        **vars(kernels) | vars(backend), jit=jit, jax_backend=jax_backend
    )


@pytest.fixture(scope="session")
def jax_module(tmp_path_factory):
    """What the modules of the traced scaffold define, see :func:`load`."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: pip install 'jax[cpu]'")
    return load(tmp_path_factory.mktemp("scaffold"))
