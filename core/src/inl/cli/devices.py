"""``inl devices``: available devices, and why others are unavailable."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli.table import print_table
from inl.plugin import Registry, registry
from inl.plugin.device_selection import choose_auto

if TYPE_CHECKING:
    from inl.device import DeviceInfo

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    why: Annotated[
        bool,
        typer.Option("--why", help='Print which device "auto" selects, and why.'),
    ] = False,
    place: Annotated[
        str | None,
        typer.Option(metavar="SCHEME", help="List those of a place, such as ray."),
    ] = None,
) -> None:
    """List devices, and why others are unavailable."""
    known = registry()
    rows = device_rows(known) if place is None else place_rows(known, place)
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    print_table(("device", "name", "memory"), [_cells(row) for row in rows])
    if why:
        print(choose_auto(registry()).why())


def device_rows(known: Registry) -> list[dict[str, Any]]:
    """Return one row per device, per device type without devices, per failed plugin,
    and per well-known device type without a plugin.
    """
    rows = [
        _row(
            f"{row.type}:{row.info.index}" if row.info else str(row.type),
            "ready" if row.info else "unavailable",
            row.origin.package,
            row.reason,
            row.info,
        )
        for row in known.devices()
    ]
    rows += [
        _row(each.origin.name, each.status, each.origin.package, each.detail)
        for each in known.failed
    ]
    return rows + [
        _row(str(kind), "not installed", None, known.advice(kind))
        for kind in known.absent
    ]


def place_rows(known: Registry, place: str) -> list[dict[str, Any]]:
    """Return one row per device of a place; ``ray:`` is ``ray``.

    Raises :class:`~inl.errors.PluginError` for a place that lists none.
    """
    origin, devices = known.place_devices(place.removesuffix(":"))
    return [_row(name, "ready", origin.package, None, info) for name, info in devices()]


def _row(
    device: str,
    status: str,
    plugin: str | None,
    reason: str | None,
    info: DeviceInfo | None = None,
) -> dict[str, Any]:
    return {
        "device": device,
        "status": status,
        "name": info and info.name,
        "memory_bytes": info and info.memory_bytes,
        "plugin": plugin,
        "reason": reason,
        "note": info.note if info else "",
    }


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    if row["status"] != "ready":
        return row["device"], row["status"], row["reason"]
    name = f"{row['name']} ({row['note']})" if row["note"] else row["name"]
    return row["device"], name, show_bytes(row["memory_bytes"])


def show_bytes(count: int | None) -> str:
    """Format a byte count, such as ``"139.8 GiB"``; empty if unknown."""
    if count is None:
        return ""
    power = min(max(count.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    if power == 0:
        return f"{count} bytes"
    return f"{count / 1024**power:.1f} {UNITS[power]}"
