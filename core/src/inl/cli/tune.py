"""``inl tune``: measures kernel configurations on this machine and stores the best."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.bounded_json import parse_json
from inl.cli import arguments
from inl.cli.progress import loading_bar
from inl.cli.table import print_table
from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.executor.tuning_record import Quarantined, Record, TuningMeasurement
    from inl.tune.trials import TuningOptions


def run(
    device: arguments.Device = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, file, config.json, smollm2 or 8b. [default: SmolLM2]"
        ),
    ] = None,
    dtype: arguments.Dtype = "auto",
    ops: Annotated[
        str, typer.Option(help="Comma-separated ops to tune. [default: all]")
    ] = "",
    rows: Annotated[str, typer.Option(help="Decode batch sizes to tune for.")] = "1,8",
    length: Annotated[
        int,
        typer.Option(
            help="Cached tokens per sequence; 1/4 and 4 times are tuned too.", min=1
        ),
    ] = 512,
    seconds: Annotated[
        float, typer.Option(help="Time budget in seconds.", min=0)
    ] = 120,
    limit: Annotated[
        float,
        typer.Option(
            help="Seconds after which a configuration counts as hanging.", min=0.1
        ),
    ] = 60,
    show: Annotated[
        bool, typer.Option("--show", help="Print stored results without measuring.")
    ] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete stored results, or those of --ops.")
    ] = False,
    export_to: Annotated[
        Path | None, typer.Option("--export", help="Write stored results to a file.")
    ] = None,
    import_from: Annotated[
        Path | None, typer.Option("--import", help="Merge results from a file.")
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Find and store the fastest correct config of each op."""
    from inl.executor.tuning_file import read, tuning_file, update, write

    path = tuning_file()
    names = tuple(name.strip() for name in ops.split(",") if name.strip())
    if clear:
        _clear(path, names)
    if import_from is not None:
        if not import_from.exists():
            raise RequestError(f"{import_from}: no such file")
        imported = read(import_from)
        update(path, lambda known: known.merged(imported))
    if not (show or clear or export_to or import_from):
        from inl.plugin.device_selection import check_device
        from inl.tune.trials import TuningOptions

        selected = str(check_device(device))
        options = TuningOptions(selected, model, dtype, names, _rows(rows), length)
        _tune(path, options, seconds, limit)
    known = read(path)
    if export_to is not None:
        write(export_to, known)
    if as_json:
        from inl.executor.tuning_record import dump

        print(json.dumps(parse_json(dump(known), "record")))
    elif not clear:
        _show(known, path)


def _clear(path: Path, ops: tuple[str, ...]) -> None:
    from inl.executor.tuning_file import update

    if ops:
        update(path, lambda known: known.without(lambda e: e.work.op in ops))
    else:
        path.unlink(missing_ok=True)  # also removes a damaged file


def _rows(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 0 < int(p) <= 4096 for p in parts):
        raise RequestError(
            f"rows: found {text!r:.60}, accepted: whole numbers from 1 to 4096, "
            "separated by commas"
        )
    return tuple(sorted({int(part) for part in parts}))


def _tune(path: Path, options: TuningOptions, seconds: float, limit: float) -> None:
    from inl.executor.tuning_file import read, update
    from inl.tune.run import tune

    bar = loading_bar("measuring configurations")
    deadline = time.monotonic() + seconds
    tried = total = 0
    results = tune(options, read(path), deadline, limit=limit, on_progress=bar)
    for result in results:
        new = result.record
        update(path, lambda known, new=new: known.merged(new))  # type: ignore[misc]
        tried, total = tried + result.tried, total + result.total
    if tried < total:
        log = logging.getLogger("inl")
        log.warning(
            f"tried {tried} of {total} configurations in {seconds:g} s; raise --seconds"
        )


def _show(known: Record, path: Path) -> None:
    from inl.spec.workload import described

    if not known:
        print(f"no results in {path}")
        return
    rows: list[tuple[str, ...]] = []
    for entry in known.measured.values():
        gain = entry.before / entry.seconds
        gained = f"{1e6 * entry.seconds:.2f} us" + (
            f", {gain:.2f} x as fast" if entry.config else ""
        )
        rows.append((*_head(entry), described(entry.config), gained))
    for bad in known.quarantined.values():
        rows.append((*_head(bad), described(bad.config), f"quarantined: {bad.reason}"))
    print_table(("op", "dtype", "shape", "device", "configuration", "result"), rows)


def _head(entry: TuningMeasurement | Quarantined) -> tuple[Any, ...]:
    return (entry.work.op, entry.work.dtype, entry.work.shape, entry.facts.device)
