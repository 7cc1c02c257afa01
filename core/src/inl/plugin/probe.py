"""Runs a plugin's device probe and validates its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable, PluginError
from inl.plugin.contribution import (
    BackendEntry,
    describe,
    guarded,
    one_line,
    resolve,
)
from inl.plugin.printed import stdout_to_stderr

TIMEOUT_SECONDS = 10.0
"""Time limit of a probe: a driver that hangs must not block the process."""


class ProbeResult(NamedTuple):
    """Devices of a backend, or the reason why there are none."""

    devices: tuple[DeviceInfo, ...]
    reason: str | None = None
    broken: bool = False
    """Whether the probe itself failed."""


def run_probe(entry: BackendEntry) -> ProbeResult:
    """Run the probe of a backend; failures are returned, not raised."""
    kind = entry.device_type
    if entry.probe is None:
        return ProbeResult((DeviceInfo(0, str(kind)),))
    try:
        probe = resolve(entry.origin, f"probe of {kind}", entry.probe)
    except PluginError as error:
        return ProbeResult((), str(error), broken=True)
    try:
        return guarded(partial(_checked_result, probe))
    except PluginError as error:
        reason = f"{entry.origin}: the probe failed: {error}"
        return ProbeResult((), reason, broken=True)


def _checked_result(probe: Callable[[], Iterable[Any]]) -> ProbeResult:
    try:
        devices = _call_with_timeout(probe)
    except BackendUnavailable as error:
        return ProbeResult((), one_line(error) or "the probe gave no reason")
    for info in devices:
        if not isinstance(info, DeviceInfo) or not _is_valid(info):
            raise PluginError(
                f"the probe returned {info!r:.80}, accepted: DeviceInfo(index, name, "
                "memory_bytes or None, note, "
                "bytes_per_second or None)"
            )
    if len({info.index for info in devices}) < len(devices):
        raise PluginError(f"the probe returned an index twice: {devices!r:.200}")
    return ProbeResult(devices, None if devices else "the probe found no device")


def _call_with_timeout(probe: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
    """Call a probe in a daemon thread, which is abandoned after the time limit."""
    results: list[tuple[Any, ...]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(tuple(probe()))
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="inl-probe", daemon=True)
    with stdout_to_stderr():
        thread.start()
        thread.join(TIMEOUT_SECONDS)
    for error in errors:
        if isinstance(error, KeyboardInterrupt):
            # Ctrl-C interrupts the main thread: this is the probe's own.
            raise PluginError(describe(error)) from error
        raise error
    if not results:
        raise BackendUnavailable(f"probe took over {TIMEOUT_SECONDS:g} s")
    return results[0]


def _is_valid(info: DeviceInfo) -> bool:
    numbers = [info.index, 0 if info.memory_bytes is None else info.memory_bytes]
    counts = all(type(number) is int and number >= 0 for number in numbers)
    speed = info.bytes_per_second
    known = speed is None or (type(speed) in (int, float) and 0 < speed < math.inf)
    text = isinstance(info.name, str) and isinstance(info.note, str)
    return counts and known and text
