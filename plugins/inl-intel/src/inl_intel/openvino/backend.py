"""Backend of one device of OpenVINO."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import numpy as np

from inl.backend.base import (
    Backend,
    ContextLengths,
    DeviceMemory,
    Program,
    StateSpec,
    StorageDtypes,
    Traits,
)
from inl.backend.bucket_sizes import padded_buckets
from inl.backend.host import host_memory
from inl.backend.provisional import WholeModels
from inl.backend.simple import zeroed_state
from inl.dtypes import HostArray, widen, wrap
from inl.errors import RequestError
from inl.spec.cache import Paged, Slotted, State
from inl_intel.openvino import gathered, paged
from inl_intel.openvino.forms import CONTEXTS, DECODES, PREFILLS, form_of, is_paged
from inl_intel.openvino.model import graph_model
from inl_intel.openvino.runtime import Runtime
from inl_intel.settings import openvino_device

if TYPE_CHECKING:
    from inl.device import Device
    from inl.spec.kernel import Kernel
    from inl.spec.limits import Limits
    from inl.spec.model import Model
    from inl.spec.program import ProgramInfo
    from inl.spec.step import Bucket

C = TypeVar("C")


@final
class OpenVinoBackend(Backend):
    """One device of OpenVINO, ``INL_XPU_RUNTIME``: layers and head of a model in one
    graph, steps and sampling in NumPy.

    name: OpenVINO's name of the device; by default that of the setting. pages: whether
    graphs have paged attention; by default where the device has it.
    Raises :class:`BackendUnavailable` where OpenVINO has no such device.
    """

    def __init__(
        self,
        device: Device,
        *,
        name: str = "",
        dtype: str = "",
        pages: bool | None = None,
    ) -> None:
        self.device = device
        self.runtime = Runtime(name or openvino_device(device), dtype)
        self.pages = is_paged(self.runtime) if pages is None else pages
        self.form = form_of(self.runtime, pages=self.pages)
        self.traits = Traits(
            dtypes=(self.runtime.dtype,),
            block_size=paged.BLOCK_SIZE,
            depth=1,
            readers=min(os.cpu_count() or 1, 8),
        )

    def tensor(self, data: HostArray) -> Any:
        values = widen(data)
        return values.astype(np.float32 if values.dtype.kind == "f" else values.dtype)

    def numpy(self, x: Any) -> HostArray:
        return wrap(np.asarray(x))

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        for item in spec:
            if isinstance(item, Slotted):
                raise RequestError(
                    f"{self.device}: the model keeps {item.name!r} for each sequence; "
                    "OpenVINO serves models whose only state are keys and values"
                )
        if limits.adapters:
            raise RequestError(
                f"EngineConfig.max_adapters: found {limits.adapters}, but "
                f"{self.device} on OpenVINO takes no adapters; accepted: 0"
            )
        if limits.block_size != paged.BLOCK_SIZE:
            raise RequestError(
                f"{self.device}: found blocks of {limits.block_size} tokens, graphs of "
                f"OpenVINO accept {paged.BLOCK_SIZE}"
            )
        pages = paged.Pages if self.pages else gathered.Pages

        def cache(group: Paged, _layer: int, blocks: int) -> Any:
            return pages(group, blocks, limits)

        return zeroed_state(spec, limits, np.zeros, cache=cache)

    def memory(self) -> DeviceMemory:
        return host_memory()

    def kernels(self) -> Iterable[Kernel]:
        return self.form.kernels

    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        if self.pages:
            return ()
        return padded_buckets(limits, decodes=DECODES, prefills=PREFILLS)

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,  # noqa: ARG002
        *,
        consumes: Sequence[int],  # noqa: ARG002
        info: ProgramInfo | None = None,  # noqa: ARG002
    ) -> Program:
        return function

    def offers(self, kind: type[C]) -> C | None:
        if kind is StorageDtypes:
            dtypes = StorageDtypes(self.runtime.dtypes, self._storing)
            return cast("C", dtypes)
        if kind is WholeModels:
            return cast("C", WholeModels(self._whole))
        if kind is ContextLengths and not self.pages:
            return cast("C", ContextLengths(context_lengths))
        return None

    def _storing(self, dtype: str) -> OpenVinoBackend:
        name, pages = self.runtime.name, self.pages
        return OpenVinoBackend(self.device, name=name, dtype=dtype, pages=pages)

    def _whole(self, model: Model) -> Model:
        return graph_model(model, self.form)


def context_lengths(limits: Limits) -> tuple[int, ...]:
    """Return the context lengths that graphs are made for; the longest is added."""
    return tuple(length for length in CONTEXTS if length < limits.max_tokens)
