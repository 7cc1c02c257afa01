"""Timing of Triton kernel configurations on a GPU, for ``inl tune``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from inl.backend.tunable import Facts, Tunable
from inl_torch.gpu.graphs import warm_up_stream
from inl_torch.triton import search_space
from inl_torch.triton.tuning import Tuning

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.kernel import Kernel
    from inl.spec.workload import Config

LAUNCHES = 32
"""Fewest calls in a timed graph: events resolve microseconds, not less."""
REPLAYS = 9


@final
class Tuner(Tunable):
    """Tile and split configurations of the Triton kernels, timed by device events.

    tuning: the defaults of the chip at ``place``. facts: returns what results are valid
    for; called only when results are read or written.
    """

    def __init__(
        self, place: torch.device, tuning: Tuning, facts: Callable[[], Facts]
    ) -> None:
        self._place, self._tuning, self._facts = place, tuning, facts
        properties = torch.cuda.get_device_properties(place)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 64 << 20))

    def facts(self) -> Facts:
        return self._facts()

    def search_space(
        self, op: str, *specs: Any, **attrs: Any
    ) -> Sequence[Sequence[Config]]:
        return search_space.search_space(op, specs, attrs, self._tuning)

    def kernel(self, op: str, config: Config) -> Kernel:
        return search_space.kernel(op, config, self._tuning)

    def seconds(self, backend: Backend, calls: Sequence[Callable[[], Any]]) -> float:  # noqa: ARG002
        """Time one call by replaying a graph of all calls, without host overhead."""
        rounds = -(-LAUNCHES // len(calls))
        with torch.inference_mode():
            side = warm_up_stream(self._place)
            with torch.cuda.stream(side):
                calls[0]()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(rounds):
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
        return 1e-3 * statistics.median(times) / (rounds * len(calls))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
