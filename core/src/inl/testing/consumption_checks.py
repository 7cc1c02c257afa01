"""Check of consumption: a step neither copies the old cache nor leaves it readable."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.backend.reference import BodyRun
from inl.dtypes import widen
from inl.spec.cache import Paged
from inl.spec.op import CATALOG
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.testing.check import CheckFailed, Measure
from inl.testing.play import admission, one_step
from inl.testing.runner_frames import first_blocks, opened

if TYPE_CHECKING:
    from inl.runners.local_runner import LocalRunner
    from inl.testing.oracle import Tiny

SLOWER: Final = 2.5
"""A step on a large cache may take this many times that on a small cache."""

COPY_STEPS: Final = 4
"""Copying the large cache takes about this many steps on the small cache."""

COPY_SPEED: Final = 10e9
"""Bytes per second of a copy on a device that does not declare its bandwidth."""

LEAST_BYTES, MOST_BYTES = 64 << 20, 512 << 20
"""Bounds of the size of the large cache."""

COPIES: Final = (
    "The program copies the cache that it consumes: write in place, donate the "
    "arguments that `consumes` lists, or drop every reference to them before waiting "
    "for the results"
)

DECODES, TRIES = 5, 3
"""Steps that are timed, and repetitions before a slow one counts as a copy."""


def consumed(tiny: Tiny) -> Measure | None:
    """Check a decode step; returns the ratio of its times on large and small caches.

    The time is not measured where an op's body, which copies, writes the cache.
    """
    with opened(tiny) as runner:
        steps = _Steps(runner)
        steps.check_unreadable(tiny)
        if _writes_by_body(runner):
            return None
        steps.check_in_place()
        small = steps.seconds()
        blocks = _large_blocks(tiny, small)
        with opened(tiny, blocks=(blocks,)) as other:
            large_steps = _Steps(other)
            for _ in range(TRIES):
                large = large_steps.seconds()
                measure = Measure(large / small, SLOWER)
                if measure.ratio <= 1:
                    return measure
                small = max(small, steps.seconds())
    size = blocks * _block_bytes(tiny) >> 20
    raise CheckFailed(
        f"step: takes {1e3 * large:.3g} ms with a cache of {size} MiB and "
        f"{1e3 * small:.3g} ms with a small one, accepted: up to {SLOWER:g} times as "
        f"long. {COPIES}",
        measure,
    )


class _Steps:
    """A prompt and then one decode step after the other on slot 1."""

    def __init__(self, runner: LocalRunner) -> None:
        self._runner, self._number = runner, 1
        limits = runner.limits
        runner.submit(admission(limits, 1, first_blocks(runner, 32)))
        self._step([7, 8, 9][: max((b.tokens for b in limits.buckets), default=3)])

    def decode(self) -> None:
        self._step([-1])

    def _step(self, tokens: list[int]) -> None:
        frame = one_step(
            self._runner.limits, [(1, tokens)], step=self._number,
            decoding=int(tokens == [-1]),
        )  # fmt: skip
        self._number += 1
        self._runner.submit(frame)
        self._runner.collect()

    def seconds(self) -> float:
        """Return the shortest time of some decode steps, in seconds."""
        self.decode()
        times = []
        for _ in range(DECODES):
            began = time.perf_counter()
            self.decode()
            times.append(time.perf_counter() - began)
        return min(times)

    def check_unreadable(self, tiny: Tiny) -> None:
        """Require that nothing refers to the buffers that a step has replaced."""
        executor = self._runner.executor
        self.decode()
        before = [_references(cache) for cache in executor.state.caches]
        self.decode()
        gc.collect()
        for layer, references in enumerate(before):
            current = list(leaves(executor.state.caches[layer]))
            for reference in references:
                _check_gone(tiny, layer, reference, current)

    def check_in_place(self) -> None:
        """Require that most of each cache stays where it is in memory.

        Where addresses can be read; a copy that is written back takes time only.
        """
        executor = self._runner.executor
        self.decode()
        before = [_addresses(cache) for cache in executor.state.caches]
        self.decode()
        for layer, old in enumerate(before):
            new = _addresses(executor.state.caches[layer])
            moved = sum(size for at, size in new.items() if at not in old)
            if 2 * moved > sum(new.values()):
                raise CheckFailed(
                    f"cache of layer {layer}: found at other addresses after a step, "
                    f"expected: the same. {COPIES}"
                )


def _addresses(cache: Any) -> dict[int, int]:
    """Return the bytes at each address of a cache that the host can read by DLPack."""
    found = {}
    for leaf in leaves(cache):
        # Arrays of a device or of a dtype that NumPy lacks raise errors of their own.
        with suppress(Exception):
            view = np.from_dlpack(leaf)
            found[view.ctypes.data] = view.nbytes
    return found


def _references(cache: Any) -> list[weakref.ref[Any]]:
    """Return weak references to the tensors of a cache that support them."""
    references = []
    for leaf in leaves(cache):
        with suppress(TypeError):
            references.append(weakref.ref(leaf))
    return references


def _check_gone(
    tiny: Tiny, layer: int, reference: weakref.ref[Any], current: list[Any]
) -> None:
    tensor = reference()
    if tensor is None or any(tensor is each for each in current):
        return
    fetch = tiny.target.backend.numpy
    try:
        values = widen(fetch(tensor))
    # Frameworks raise errors of their own for a donated buffer.
    except Exception:
        return
    if any(np.array_equal(values, widen(fetch(each))) for each in current):
        return  # another name of the same memory
    if np.isnan(values).all():
        return  # spoiled
    raise CheckFailed(
        f"cache of layer {layer}: can be read after the step that has consumed it; "
        "expected: deleted, or written in place. Something keeps an argument of the "
        "program, such as an attribute or a closure of `compile`; a framework that "
        "counts references then copies the cache in every step"
    )


def _writes_by_body(runner: LocalRunner) -> bool:
    tracer = runner.executor.tracer(Bucket(tokens=1, rows=1))
    return any(
        choice.kernel is not None and isinstance(choice.kernel.run, BodyRun)
        for name, choices in tracer.choices.items()
        if "cache" in CATALOG[name].consumes
        for choice in choices.values()
    )


def _block_bytes(tiny: Tiny) -> int:
    from inl.backend.base import CacheBytes
    from inl.backend.state_bytes import block_bytes

    layout = tiny.target.backend.offers(CacheBytes)
    state = tiny.language.model.state(tiny.language.config)
    size = tiny.limits().block_size
    paged = [item for item in state if isinstance(item, Paged)]
    return sum(block_bytes(item, size, layout) for item in paged)


def _large_blocks(tiny: Tiny, seconds: float) -> int:
    """Return the number of blocks whose copy takes longer than a few steps."""
    free = tiny.target.backend.memory().free
    wanted = int(COPY_STEPS * seconds * _bandwidth(tiny))
    size = min(max(wanted, LEAST_BYTES), MOST_BYTES, max(free // 8, 1))
    return max(size // _block_bytes(tiny), tiny.limits().blocks[0])


def _bandwidth(tiny: Tiny) -> float:
    """Return the declared bandwidth of the device, at least :data:`COPY_SPEED`."""
    from inl.plugin import registry

    device = tiny.target.device
    devices = registry().find(device.type).devices
    declared = [d.bytes_per_second or 0 for d in devices if d.index == device.index]
    return max([COPY_SPEED, *declared])
