"""``inl explain --cost``: a roofline model of one step, op by op.

The minimum time of an op is its bytes over the memory bandwidth, or its FLOPs over the
compute peak if that is known and takes longer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.backend.bandwidth import MeasuredBandwidth, memory_bandwidth
from inl.cli.table import print_table
from inl.spec.kernel import PLAIN
from inl.spec.op import Cost
from inl.spec.strict_array import StrictArray
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.cli.traced_step import ExplainedStep
    from inl.spec.dispatch import Call, Tracer

OUTSIDE_STEP = ("admit", "set_token_bias", "mask_logits")
"""Traced ops that no ordinary step contains."""

HEADS = ("op", "calls", "MFLOP", "MB", "FLOP/byte", "us", "share", "kernel")


class OpCost(NamedTuple):
    """Calls of an op by one kernel, and their total cost."""

    op: str
    winner: str
    calls: int
    cost: Cost


def op_costs(tracer: Tracer) -> list[OpCost]:
    """Return the cost of every op that a kernel or the host computes.

    Composed ops are left out: their inner ops are listed instead.
    """
    totals: dict[tuple[str, str], OpCost] = {}
    for call in _computed(tracer.log):
        name, winner = call.spec.name, call.choice.winner
        calls, flops, moved = 0, 0, 0
        if (name, winner) in totals:
            _, _, calls, (flops, moved) = totals[name, winner]
        cost = call.spec.cost(call.results, *call.args, **call.attrs)
        total = Cost(flops + cost.flops, moved + cost.bytes)
        totals[name, winner] = OpCost(name, winner, calls + 1, total)
    return list(totals.values())


def _computed(log: Iterable[Call]) -> Iterable[Call]:
    for call in log:
        if call.choice.how != "composed" and call.spec.name not in OUTSIDE_STEP:
            yield call


def cost_report(
    step: ExplainedStep, bandwidth: float | None, peak: float | None
) -> dict[str, Any]:
    """Return the roofline as plain values.

    bandwidth: GB/s; ``None`` measures it. peak: TFLOP/s; ``None`` leaves compute out.
    """
    if bandwidth is None:
        ceiling = memory_bandwidth(step.plan.backend)
    else:
        ceiling = MeasuredBandwidth(bandwidth * 1e9, "as given")
    speeds = ceiling and ceiling.bytes_per_second, peak and peak * 1e12
    costs = op_costs(step.tracer)
    rows = [_row(each, *speeds) for each in costs]
    moved = sum(row["bytes"] for row in rows)
    seconds = None if ceiling is None else sum(row["seconds"] for row in rows)
    for row in rows:
        by_time = row["seconds"] / seconds if seconds else None
        row["share"] = row["bytes"] / moved if by_time is None else by_time
    rows.sort(key=lambda row: -row["share"])
    flops = sum(row["flops"] for row in rows)
    return {
        "context": step.context,
        "bandwidth": ceiling and ceiling._asdict(),
        "peak_flops": speeds[1],
        "rows": rows,
        "total": {"flops": flops, "bytes": moved, "seconds": seconds},
        "notes": _notes(step, ceiling, peak),
    }


def _row(each: OpCost, bandwidth: float | None, peak: float | None) -> dict[str, Any]:
    flops, moved = each.cost
    times = [moved / bandwidth if bandwidth else None, flops / peak if peak else 0.0]
    return {
        "op": each.op,
        "kernel": each.winner,
        "calls": each.calls,
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved if moved else None,
        "seconds": None if times[0] is None else max(time or 0.0 for time in times),
    }


def _notes(
    step: ExplainedStep, ceiling: MeasuredBandwidth | None, peak: float | None
) -> list[str]:
    """What the numbers assume."""
    notes = [f"every sequence has its longest context, {step.context} tokens"]
    if ceiling is None:
        notes.append("no bandwidth: shares are of bytes; set --bandwidth for times")
    else:
        speed = ceiling.bytes_per_second / 1e9
        notes.append(f"memory bandwidth {speed:.1f} GB/s ({ceiling.how})")
    if peak is None:
        notes.append("compute peak not known: times are from memory bandwidth alone")
    return notes + _weight_notes(step.tracer)


def _weight_notes(tracer: Tracer) -> list[str]:
    weights = [
        leaf
        for call in _computed(tracer.log)
        for leaf in leaves(call.args)
        if isinstance(leaf, StrictArray) and leaf.layout != PLAIN
    ]
    notes = []
    if any(leaf.stored_bytes is not None for leaf in weights):
        notes.append("packed weights count their size in the checkpoint")
    dense = {leaf.layout for leaf in weights if leaf.stored_bytes is None}
    if dense:
        names = ", ".join(sorted(dense))
        notes.append(
            f"weights in layout {names} count their dense size; "
            "the packed size is not known"
        )
    return notes


def show_costs(report: dict[str, Any]) -> None:
    """Print the table, its total and the notes."""
    total = {"op": "total", "calls": "", "kernel": "", "share": 1.0, **report["total"]}
    total["intensity"] = total["flops"] / total["bytes"] if total["bytes"] else None
    cells = [_cells(row) for row in [*report["rows"], total]]
    widths = [max(map(len, column)) for column in zip(HEADS, *cells, strict=True)]
    heads, *rows = (_aligned(row, widths) for row in [HEADS, *cells])
    # Numbers need their units, so the heads are printed to a pipe as well.
    print_table(heads, rows if sys.stdout.isatty() else [heads, *rows])
    for note in report["notes"]:
        print(f"  {note}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    intensity, seconds = row["intensity"], row["seconds"]
    return (
        row["op"],
        str(row["calls"]),
        f"{row['flops'] / 1e6:.3f}",
        f"{row['bytes'] / 1e6:.3f}",
        "-" if intensity is None else f"{intensity:.2f}",
        "-" if seconds is None else f"{seconds * 1e6:.1f}",
        f"{row['share']:.1%}",
        row["kernel"],
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> tuple[str, ...]:
    """Align the numbers between the first and the last column to the right."""
    numbers = zip(row[1:-1], widths[1:-1], strict=True)
    return (row[0], *(cell.rjust(width) for cell, width in numbers), row[-1])
