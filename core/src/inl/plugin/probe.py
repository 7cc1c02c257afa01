"""Asks a plugin's probe which devices there are, and checks what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable, PluginError
from inl.plugin.contribution import BackendEntry, guarded, one_line, resolve

SECONDS = 10.0
"""Patience with one probe: a driver that hangs must not hang everybody."""


class Found(NamedTuple):
    """What a probe said: devices, or the reason why there are none."""

    devices: tuple[DeviceInfo, ...]
    reason: str | None = None
    broken: bool = False
    """The probe itself failed."""


def ask(entry: BackendEntry) -> Found:
    """Run the probe of a backend; never raises because of it."""
    kind = entry.device_type
    if entry.probe is None:
        return Found((DeviceInfo(0, str(kind)),))
    try:
        probe = resolve(entry.origin, f"probe of {kind}", entry.probe)
    except PluginError as error:
        return Found((), str(error), broken=True)
    try:
        return guarded(partial(_devices, probe))
    except PluginError as error:
        reason = f"{entry.origin}: the probe failed: {error}"
        return Found((), reason, broken=True)


def _devices(probe: Callable[[], Iterable[Any]]) -> Found:
    try:
        devices = _answer(probe)
    except BackendUnavailable as error:
        return Found((), one_line(error) or "the probe gave no reason")
    for info in devices:
        if not isinstance(info, DeviceInfo) or not _is_sound(info):
            raise PluginError(
                f"the probe gave {info!r:.80}, accepted: DeviceInfo(index, name, "
                "memory_bytes or None, note)"
            )
    if len({info.index for info in devices}) < len(devices):
        raise PluginError(f"the probe gave one index twice: {devices!r:.200}")
    return Found(devices, None if devices else "the probe found no device")


def _answer(probe: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
    """What a probe says, asked in a thread that is left behind if it never does."""
    said: list[tuple[Any, ...]] = []
    raised: list[BaseException] = []

    def ask_it() -> None:
        try:
            said.append(tuple(probe()))
        # Nothing may be lost in a thread; the caller decides.
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=ask_it, name="inl-probe", daemon=True)
    thread.start()
    thread.join(SECONDS)
    for error in raised:
        raise error
    if not said:
        raise BackendUnavailable(f"its probe did not answer within {SECONDS:g} s")
    return said[0]


def _is_sound(info: DeviceInfo) -> bool:
    numbers = [info.index, 0 if info.memory_bytes is None else info.memory_bytes]
    counts = all(type(number) is int and number >= 0 for number in numbers)
    return counts and isinstance(info.name, str) and isinstance(info.note, str)
