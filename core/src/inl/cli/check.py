"""``inl check``: runs the conformance kit on a device."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inl.cli.check_progress import CheckProgress
from inl.cli.table import print_table
from inl.errors import RequestError
from inl.plugin import make_backend
from inl.plugin.device_selection import check_device

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.testing.check import Result
    from inl.testing.target import Target

SHOWN = 20
"""Maximum number of findings printed."""

NAMED = 5
"""Maximum number of ops without an invariant kernel that are named."""


def run(
    device: Annotated[str, typer.Argument(help='Device, such as "cpu:0" or "npu".')],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the capability card as a JSON object.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Test more seeds and sizes (takes minutes).")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of all inputs. [default: INL_CHECK_SEED, or 16]", min=0
        ),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Check only the kernels of this op; can be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only the checks of this name, or whose names begin with these "
            'parts, such as "runner" or "attention/mixed"; can be repeated.',
            metavar="NAME",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Also check each op of the steps of this model, with its sizes and "
            "weights; the checks are named model/OP.",
            metavar="MODEL",
        ),
    ] = None,
    gaps: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of known failures: names, or their first parts, and "
            "reasons.",
            metavar="FILE",
        ),
    ] = None,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Check only the invariant mode.")
    ] = False,
) -> None:
    """Check the backend of DEVICE against the reference ops.

    The exit code is 1 if a check fails.
    """
    from inl.testing.card import capability_card
    from inl.testing.conformance import check_all
    from inl.testing.invariant_checks import INVARIANT
    from inl.testing.target import Target, default_seed

    chosen = check_device(device)
    make_backend(chosen)  # an unavailable device is a usage error, not a failed check
    chosen_seed = default_seed() if seed is None else seed
    target = Target(
        chosen, seed=chosen_seed, full=full, only=tuple(op or ()), model=_opened(model)
    )
    _check_ops(target)
    began = time.perf_counter()
    progress = CheckProgress(sys.stderr)
    results = check_all(
        target,
        on_result=None if as_json else progress,
        names=(INVARIANT,) if invariant else tuple(only or ()),
        gaps=_read_gaps(gaps) if gaps else {},
    )
    progress.close()
    seconds = time.perf_counter() - began
    if as_json:
        card = capability_card(target, results, seconds)
        print(json.dumps(card, ensure_ascii=False))
    else:
        _show(target, results, seconds)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(1)


def _opened(model: str | None) -> LanguageModel | None:
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.executor.model_loader import open_model

    return None if model is None else open_model(resolve_model(model))


def _read_gaps(path: Path) -> dict[str, str]:
    """Return the table ``gaps`` of a TOML file.

    Raises :class:`RequestError` if the file cannot be read or is none of such a table.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8-sig")).get("gaps")
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {error}") from None
    if not isinstance(table, dict) or not all(
        isinstance(reason, str) for reason in table.values()
    ):
        raise RequestError(
            f"{path}: found no table [gaps] of names and reasons; accepted: lines such "
            'as "attention/mixed" = "driver 2.1 rounds scores"'
        )
    return table


def _check_ops(target: Target) -> None:
    from inl.ops import unknown_op

    for name in target.only:
        if name not in target.ops:
            raise RequestError(unknown_op(name))


def _show(target: Target, results: Sequence[Result], seconds: float) -> None:
    from inl.testing.findings import findings

    print_table(("section", "passed", "failed", "worst", "time"), _rows(results))
    failures = [result for result in results if result.status == "failed"]
    found = findings(results)
    for finding in found[:SHOWN]:
        print("\n".join(finding.lines()))
    if len(found) > SHOWN:
        print(f"failed  and {len(found) - SHOWN} more; --json lists all")
    repeat = f"inl check {target.device} --seed {target.seed}"
    repeat += " --full" if target.full else ""
    repeat += "".join(f" --op {name}" for name in target.only)
    gaps = sum(result.status == "gap" for result in results)
    known = f" but for {gaps} known gaps" if gaps else ""
    if not target.only:
        print(_left_out(target) + _invariance(target, results))
    if failures:
        print(
            f"{target.device} fails {len(failures)} of {len(results)} checks in "
            f"{seconds:.1f} s; to repeat: {repeat}"
        )
    else:
        print(
            f"{target.device} passes all {len(results)} checks{known} in "
            f"{seconds:.1f} s "
            f"({', '.join(target.dtypes)}; seed {target.seed})"
        )


def _left_out(target: Target) -> str:
    """Return a line for each reason why ops are left out; empty if none are."""
    from inl.testing.optional_ops import left_out

    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(left_out(target).items()):
        reasons.setdefault(reason, []).append(name)
    return "".join(
        f"left out: {', '.join(names)} ({reason})\n"
        for reason, names in reasons.items()
    )


def _invariance(target: Target, results: Sequence[Result]) -> str:
    """Say in which dtypes the invariant mode is certified, or what it lacks."""
    from inl.testing.card import certified
    from inl.testing.invariant_checks import missing_kernels

    dtypes, missing = certified(results), missing_kernels(target)
    text = "invariant mode: " + (", ".join(dtypes) if dtypes else "not certified")
    if not missing:
        return text
    named = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
    return f"{text}; ops without an invariant kernel: {len(missing)} ({named})"


def _rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    from inl.testing.card import by_section, worst_ratio

    rows: list[tuple[str, ...]] = []
    for section, mine in by_section(results).items():
        passed = sum(result.status == "passed" for result in mine)
        ratio = worst_ratio(mine)
        seconds = sum(result.seconds for result in mine)
        rows.append(
            (
                section,
                f"{passed} passed",
                f"{sum(result.status == 'failed' for result in mine)} failed",
                "" if ratio is None else f"worst error {ratio:.0%} of its bound",
                f"{seconds:.1f} s",
            )
        )
    return rows
