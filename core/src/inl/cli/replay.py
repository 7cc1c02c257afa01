"""``inl replay``: replays a trace on another device and compares every token."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inl.cli import arguments
from inl.cli.option_groups import KernelOptions, with_groups
from inl.errors import ModelError, ProtocolError

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel
    from inl.protocol.runner import Limits, Runner
    from inl.recording.outcome import Difference, Outcome
    from inl.recording.trace_file import RunHeader


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(KernelOptions):
    """Settings of the runner, which are not recorded but for the dtype."""

    device: Annotated[str, typer.Option(help="Device to replay on.")] = "reference"
    dtype: arguments.Dtype = "recorded"


@with_groups
def run(
    *,
    file: Annotated[Path, typer.Argument(help="File written by `inl trace`.")],
    kernel_options: ReplayOptions,
    model: Annotated[
        str | None, typer.Option(help="Model folder or GGUF file, if it has moved.")
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Replay FILE and compare its tokens.

    The exit code is 1 if they differ.
    """
    from inl.recording.replay import replay
    from inl.recording.trace_file import RunHeader, read_trace
    from inl.runners.startup import start

    items = read_trace(file)
    header = items[0]
    assert isinstance(header, RunHeader), "readers check the first record"
    if kernel_options.dtype == "recorded":
        kernel_options = replace(kernel_options, dtype=header.dtype or "auto")
    config = kernel_options.config()
    language = _open(header, model, config.quantize, file)

    def make(limits: Limits) -> Runner:
        return start(language, config, limits=limits).runner

    try:
        outcome = replay(items, make)
    finally:
        language.checkpoint.close()
    if as_json:
        print(json.dumps(_as_dict(outcome, header.device, kernel_options.device)))
    else:
        print("\n".join(describe(outcome, header.device, kernel_options.device)))
    if outcome.differences:
        raise typer.Exit(1)


def _open(
    header: RunHeader, model: str | None, quantize: str | None, file: Path
) -> LanguageModel:
    from inl.checkpoints.digest import model_digest
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.executor.model_loader import open_model

    if not (model or header.model):
        raise ProtocolError(f"trace {file}: contains no model name; pass --model")
    language = open_model(resolve_model(model or header.model))
    if quantize is not None:
        language = language.quantized(quantize)
    if header.digest and (digest := model_digest(language.checkpoint)) != header.digest:
        raise ModelError(
            f"{language.checkpoint.path}: digest {digest[:12]}, {file} was recorded "
            f"with {header.digest[:12]} ({header.model}); pass the recorded model with "
            "--model, and its --quantize"
        )
    return language


def describe(outcome: Outcome, recorded: str, replayed: str) -> list[str]:
    """Format the outcome of a replay as lines."""
    lines = [
        f"{outcome.steps} steps, {outcome.rows} rows compared, {outcome.skipped} "
        f"skipped; recorded on {recorded or 'an unnamed runner'}, replayed on "
        f"{replayed}"
    ]
    if not outcome.differences:
        return [*lines, "every token is the same"]
    first = outcome.differences[0]
    lines.append(
        f"first difference: step {first.step}, row {first.row}: sequence "
        f"{first.sequence} (slot {first.slot}), token {first.position}: "
        f"recorded {first.recorded}, replayed {first.replayed}"
    )
    count = len({each.sequence for each in outcome.differences})
    return [*lines, f"{count} of {outcome.sequences} sequences differ"]


def _as_dict(outcome: Outcome, recorded: str, replayed: str) -> dict[str, object]:
    def row(each: Difference) -> dict[str, int]:
        return each._asdict()

    return {
        "recorded": recorded,
        "replayed": replayed,
        "steps": outcome.steps,
        "rows": outcome.rows,
        "skipped": outcome.skipped,
        "sequences": outcome.sequences,
        "differences": [row(each) for each in outcome.differences],
    }
