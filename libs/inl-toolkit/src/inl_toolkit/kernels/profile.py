"""Profiles of kernel calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from inl.errors import MissingPackage
from inl.install_command import install_command


class KernelCall(NamedTuple):
    """One call of a kernel."""

    name: str
    """Function and variant, such as "attention/tiled"."""
    start: float
    """Seconds since the profile began."""
    seconds: float
    device: str
    shape: tuple[int, ...]
    """Of the first argument."""


class Profile:
    """Calls in the order in which they ended; those of inner kernels come first."""

    def __init__(self) -> None:
        self.events: list[KernelCall] = []
        self.began = time.perf_counter()

    def summary(self) -> str:
        """Return a table: calls, total and mean time of each kernel, longest first."""
        totals: dict[str, list[float]] = {}
        for event in self.events:
            totals.setdefault(event.name, []).append(event.seconds)
        lines = [f"{'kernel':<32}{'calls':>7}{'total ms':>12}{'mean ms':>12}"]
        for name, times in sorted(totals.items(), key=lambda row: -sum(row[1])):
            total = 1e3 * sum(times)
            mean = total / len(times)
            lines.append(f"{name:<32}{len(times):>7}{total:>12.3f}{mean:>12.3f}")
        return "\n".join(lines)

    def save_trace(self, path: str | Path) -> None:
        """Write the events for chrome://tracing and Perfetto."""
        rows = [
            {
                "name": event.name, "ph": "X", "pid": 0, "tid": event.device,
                "ts": 1e6 * event.start, "dur": 1e6 * event.seconds,
                "args": {"shape": event.shape},
            }
            for event in self.events
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": rows}), "utf-8")

    def save_picture(self, path: str | Path) -> None:
        """Draw the events over time; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackage(
                f"a picture of a profile: {install_command('inl-core[plot]')}"
            ) from error
        names = list(dict.fromkeys(event.name for event in self.events))
        figure = Figure(figsize=(8, 1 + 0.4 * len(names)), layout="constrained")
        axes = figure.subplots()
        for event in self.events:
            axes.barh(names.index(event.name), event.seconds, left=event.start)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("seconds")
        figure.savefig(path)


_profile: ContextVar[Profile | None] = ContextVar("inl.profile", default=None)


@contextmanager
def profile_kernel() -> Iterator[Profile]:
    """Record every call of ``inl.kernels`` and of decorated functions inside.

    Each call is waited for, so that its time is that of its device.
    """
    profile = Profile()
    token = _profile.set(profile)
    try:
        yield profile
    finally:
        _profile.reset(token)


def recorded(name: str, first: Any, run: Callable[[], Any]) -> Any:
    """Call ``run``, and record it where a profile is open. first: first argument.

    While JAX traces, nothing is computed: operations of its program have the name,
    which profiles of XLA show.
    """
    if type(first).__name__.endswith("Tracer"):
        with import_module("jax").named_scope(name):
            return run()
    profile = _profile.get()
    if profile is None:
        return run()
    start = time.perf_counter()
    result = run()
    _wait(result)
    seconds = time.perf_counter() - start
    shape = tuple(getattr(first, "shape", ()))
    event = KernelCall(name, start - profile.began, seconds, device_of(first), shape)
    profile.events.append(event)
    return result


def device_of(array: Any) -> str:
    """Return the name of an array's device, as its framework spells it."""
    return str(getattr(array, "device", "cpu"))


def _wait(result: Any) -> None:
    for leaf in result if isinstance(result, (tuple, list)) else (result,):
        if hasattr(leaf, "block_until_ready"):
            leaf.block_until_ready()
        elif getattr(getattr(leaf, "device", None), "type", "cpu") == "cuda":
            import_module("torch").cuda.synchronize(leaf.device)
