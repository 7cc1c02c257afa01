"""Timing of Pallas kernels with several block sizes on a TPU, for ``inl tune``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, final

import jax

from inl.backend.tunable import MIN_SECONDS, ROUNDS, Facts, Tunable
from inl_jax.pallas import search_space

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.kernel import Kernel
    from inl.spec.workload import Config


@final
class Tuner(Tunable):
    """Block sizes of attention and of experts, by the time of programs of many calls.

    place: the TPU. interpret: simulates the kernels, for tests.
    """

    cache_bytes = 160 << 20
    """More than the VMEM of any chip."""

    def __init__(self, place: jax.Device, interpret: Any = False) -> None:
        self._place, self._interpret = place, interpret

    def facts(self) -> Facts:
        return Facts(
            device=self._place.device_kind,
            driver=self._place.client.platform_version.partition("\n")[0],
            compiler=f"jax {jax.__version__}, libtpu {installed('libtpu')}",
            plugin=f"inl-tpu {installed('inl-tpu')}",
        )

    def search_space(
        self, op: str, *specs: Any, **attrs: Any
    ) -> Sequence[Sequence[Config]]:
        return search_space.search_space(op, specs, attrs)

    def kernel(self, op: str, config: Config) -> Kernel:
        return search_space.kernel(op, config, self._interpret)

    def seconds(self, backend: Backend, calls: Sequence[Callable[[], Any]]) -> float:  # noqa: ARG002
        """Time one program that makes all calls: one launch by the host for all."""
        program, arguments = together(calls)

        def once(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                result = program(*arguments)
            jax.block_until_ready(result)
            return (time.perf_counter() - began) / (count * len(calls))

        once(1)  # compiles
        count = max(1, min(1000, int(MIN_SECONDS / (once(1) * len(calls)))))
        return statistics.median(once(count) for _ in range(ROUNDS))


def together(calls: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
    """Return a program of all calls, and its arguments.

    Calls are ``partial`` objects of functions of arrays, with static keywords.
    """
    bound = []
    for call in calls:
        assert isinstance(call, partial), "a call is a function and its arguments"
        bound.append(call)

    def run(*arguments: Any) -> list[Any]:
        pairs = zip(bound, arguments, strict=True)
        return [call.func(*args, **call.keywords) for call, args in pairs]

    return jax.jit(run), [call.args for call in bound]


def installed(distribution: str) -> str:
    """Return the version of a distribution, or a note that it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of a source tree"
