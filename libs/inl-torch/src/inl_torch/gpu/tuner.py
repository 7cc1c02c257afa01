"""What ``inl tune`` measures on an NVIDIA GPU, and how."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, final

import torch

from inl.backend.tunable import Facts, Tunable
from inl.errors import BackendUnavailable
from inl_cuda.probe import load, opened
from inl_cuda.tuning import tuning
from inl_torch.triton import search_space

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.kernel import Kernel
    from inl.spec.workload import Config

LAUNCHES = 32
"""Calls in a graph at least: events tell microseconds apart, not less."""
REPLAYS = 9
VERSION_BYTES = 80


@final
class Ways(Tunable):
    """Tiles and splits of the Triton kernels, timed by the device's own clock."""

    def __init__(self, place: torch.device) -> None:
        self._place, self._tuning = place, tuning(place)
        facts = torch.cuda.get_device_properties(place)
        self.cache_bytes = int(getattr(facts, "L2_cache_size", 64 << 20))

    def facts(self) -> Facts:
        return Facts(
            device=torch.cuda.get_device_name(self._place),
            driver=driver_version(),
            compiler=f"triton {_version('triton')}",
            plugin=f"inl-cuda {_version('inl-cuda')}",
        )

    def search_space(
        self, op: str, *specs: Any, **attrs: Any
    ) -> Sequence[Sequence[Config]]:
        return search_space.axes(op, specs, attrs, self._tuning)

    def kernel(self, op: str, config: Config) -> Kernel:
        return search_space.kernel(op, config, self._tuning)

    def seconds(self, backend: Backend, calls: Sequence[Callable[[], Any]]) -> float:  # noqa: ARG002
        """Replay a graph in which every call has its turns: no host between two."""
        turns = -(-LAUNCHES // len(calls))
        with torch.inference_mode():
            side = torch.cuda.Stream(self._place)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                calls[0]()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(turns):
                    for call in calls:
                        call()
            graph.replay()
            begin, end = (_event() for _ in range(2))
            times: list[float] = []
            for _ in range(REPLAYS):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return 1e-3 * statistics.median(times) / (turns * len(calls))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def driver_version() -> str:
    """The driver's version, as its management library says it."""
    try:
        library = load()
        with opened(library):
            text = ctypes.create_string_buffer(VERSION_BYTES)
            library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(VERSION_BYTES))
            return text.value.decode(errors="replace")
    except BackendUnavailable:
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from a source tree"
