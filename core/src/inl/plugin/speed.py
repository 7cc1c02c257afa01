"""Approximate speed of devices, by which "auto" chooses: declared, or measured once.

The speed is the number of weights that a matrix-vector product reads per second, which
limits the generation of text for one user. The weights are quantized to 4 bits, as
those of the default model: a backend that has to expand them reads more bytes.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.device import Device, DeviceInfo
from inl.plugin.contribution import describe
from inl.plugin.discover import Origin
from inl.plugin.private_facts import plugin_key, read_facts, write_facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from inl.backend.base import Backend

SHAPE = (4096, 8192)
"""Outputs and inputs of the product; its weights exceed the caches of a CPU."""
SECONDS = 0.2
"""Duration of the measurement, after a first call."""
DECLARED_BYTES = 2
"""Bytes per weight that a declared bandwidth is assumed to be used for."""
STORED = "q4_1"
STORED_BYTES = 20
"""Bytes of a group of 32 weights."""
TYPES = {"weights_per_second": float}


class Speed(NamedTuple):
    """Speed of a device, and how it is known."""

    device: Device
    weights_per_second: float
    """0 if the measurement failed."""
    how: str
    """"declared", "measured", or the reason of the failure."""

    def __str__(self) -> str:
        if not self.weights_per_second:
            return f"{self.device}: {self.how}"
        billions = self.weights_per_second / 1e9
        return f"{self.device}: {billions:.3g} billion weights/s, {self.how}"


def speed_of(
    device: Device, info: DeviceInfo, origin: Origin, make: Callable[[Device], Backend]
) -> Speed:
    """Return the speed that the probe declares, or measure it once per plugin version.

    make: opens the backend. A failure is a speed of 0.
    """
    if info.bytes_per_second is not None:
        return Speed(device, info.bytes_per_second / DECLARED_BYTES, "declared")
    key = plugin_key(origin, str(device), info.name, platform.node())
    facts = read_facts(key, TYPES)
    if facts is None:
        try:
            facts = {"weights_per_second": measure(make(device))}
        # Any exception of a third-party backend makes its device the last choice.
        except Exception as error:
            return Speed(device, 0.0, f"cannot be measured: {describe(error)}")
        with suppress(OSError):
            write_facts(key, facts)
    return Speed(device, facts["weights_per_second"], "measured")


def measure(backend: Backend) -> float:
    """Return the number of weights that a matrix-vector product reads per second."""
    import numpy as np

    from inl.dtypes import cast

    dtype = backend.traits.dtypes[0]
    rows, width = SHAPE
    product = _product(backend, dtype)
    x = backend.tensor(cast(np.ones((1, width), np.float32), dtype))
    backend.numpy(product(x))
    times: list[float] = []
    while not times or sum(times) < SECONDS:
        began = perf_counter()
        backend.numpy(product(x))
        times.append(perf_counter() - began)
    return rows * width / min(times)


def _product(backend: Backend, dtype: str) -> Callable[[Any], Any]:
    """Return the backend's linear layer, as an engine selects and packs it."""
    import numpy as np

    from inl.dtypes import HostArray, cast
    from inl.ops.linear import Linear, linear
    from inl.spec.kernel import PLAIN
    from inl.spec.op import Spec
    from inl.spec.selection import KernelSelection, no_kernel_error, select_kernel
    from inl.spec.strict_array import StrictArray

    rows, width = SHAPE
    kernels = [kernel for kernel in backend.kernels() if kernel.op == "linear"]
    able = [k for k in kernels if k.can_pack(weight=Spec(SHAPE, STORED)) is None]
    best = max(able, key=lambda kernel: kernel.preference, default=None)
    layout = PLAIN
    if best is not None and best.pack is not None:
        data = np.zeros((rows, width // 32 * STORED_BYTES), np.uint8)
        group = {"weight": HostArray(data, STORED, SHAPE), "bias": None}
        w, layout = best.pack(group, backend, dtype), best.layout
    else:
        w = Linear(backend.tensor(cast(np.zeros(SHAPE, np.float32), dtype)))
    specs = (
        StrictArray((1, width), dtype),
        Linear(StrictArray(SHAPE, dtype, layout=layout)),
    )
    choice = select_kernel(linear, specs, {}, KernelSelection(tuple(kernels)))
    if choice.kernel is None:
        raise no_kernel_error(choice, str(backend.device))
    return partial(choice.kernel.run, w=w)
