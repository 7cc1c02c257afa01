"""``inl explain``: the kernel of each op, the refused ones, and roofline costs."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli import arguments
from inl.cli.option_groups import SpeculativeOptions, with_groups
from inl.errors import RequestError
from inl.spec.step import SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.cli.traced_step import ExplainedStep
    from inl.spec.dispatch import Tracer


@with_groups
def run(
    *,
    model: arguments.Model = None,
    engine_options: SpeculativeOptions,
    adapter: arguments.Adapter = None,
    tokens: Annotated[int, typer.Option(help="Tokens in the step.", min=1)] = 1,
    rows: Annotated[int, typer.Option(help="Sequences in the step.", min=1)] = 1,
    sampler: Annotated[
        str, typer.Option(help="greedy, sample or sample_filtered.")
    ] = SAMPLERS[0],
    cost: Annotated[
        bool,
        typer.Option(
            "--cost", help="FLOPs, bytes moved and the minimum time of each op."
        ),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(help="Cached tokens per sequence; the model's limit if none."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="Memory bandwidth in GB/s; measured if none."),
    ] = None,
    peak: Annotated[
        float | None,
        typer.Option(help="Peak TFLOP/s; if none, compute time is left out."),
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(
            help="A call of inl.kernels instead of a model, with shapes for arrays, "
            'such as "gemm(f16[64,64], f16[64,64], use_fp16=True)".'
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="Of --call: numpy, torch or jax; by the device if none."),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Show the kernels that a step of a model would use. Loads no weights."""
    if call is not None or framework is not None:
        _explain_call(call, engine_options.device, framework, as_json)
        return
    from inl.adapters.folder import highest_rank
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.cli.traced_step import explain_step, open_backend
    from inl.executor.model_loader import open_model

    if sampler not in SAMPLERS:
        raise RequestError(
            f"sampler: found {sampler!r:.80}, accepted: {', '.join(SAMPLERS)}"
        )
    for name, value in (("bandwidth", bandwidth), ("peak", peak)):
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"{name}: found {value}, accepted: a number above 0")
    adapters = arguments.adapters(adapter)
    config = engine_options.config(
        adapters=adapters,
        max_adapter_rank=max(map(highest_rank, adapters.values()), default=1),
        context=context,
    )
    backend = open_backend(config)  # raises before a model is downloaded
    size = Bucket(tokens=tokens, rows=min(rows, tokens), sampler=sampler)
    step = explain_step(open_model(resolve_model(model)), backend, config, size)
    report = _report(step)
    if cost:
        from inl.cli.explain_cost import cost_report

        report["cost"] = cost_report(step, bandwidth, peak)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


def _explain_call(
    call: str | None, device: str, framework: str | None, as_json: bool
) -> None:
    if call is None:
        raise RequestError("framework: found no --call, whose arrays it makes")
    # Of a package above the core, which says how to install it.
    explanation = import_module("inl.kernels").explain_call(call, device, framework)
    if not as_json:
        print(explanation.describe())
        return
    selections = [
        each._asdict() | {"refusals": dict(each.refusals)}
        for each in explanation.selections
    ]
    print(json.dumps(explanation._asdict() | {"selections": selections}))


def _report(step: ExplainedStep) -> dict[str, Any]:
    """Return the JSON object of a step."""
    plan, bucket = step.plan, step.tracer.bucket
    report: dict[str, Any] = {
        "device": str(plan.backend.device),
        "bucket": bucket._asdict(),
        "ops": explain(step.tracer),
        "weights": list(plan.notes),
        "cache": plan.cache.note,
        "layers": plan.describe_layers(bucket),
    }
    if step.draft_head is not None:
        report["draft_head"] = explain(step.draft_head)
    return report


def _show(report: dict[str, Any]) -> None:
    bucket = Bucket(**report["bucket"])
    tokens, rows = bucket.tokens, bucket.rows
    print(
        f"{report['device']}, a step of {tokens} token{'s'[: tokens > 1]} in "
        f"{rows} row{'s'[: rows > 1]} ({bucket.sampler})"
    )
    for note in report["weights"]:
        print(f"weights: {note}")
    for name, part in (("KV cache", "cache"), ("layers", "layers")):
        if report[part]:
            print(f"{name}: {report[part]}")
    if "cost" in report:
        from inl.cli.explain_cost import show_costs

        show_costs(report["cost"])
        return
    _show_kernels(report["ops"])
    if "draft_head" in report:
        print("draft head:")
        _show_kernels(report["draft_head"])


def _show_kernels(table: list[dict[str, Any]]) -> None:
    width = max(len(row["op"]) for row in table)
    for row in table:
        rounding = f", inputs {row['inputs']}" if row["inputs"] else ""
        print(f"{row['op']:<{width}}  {row['sites']:>4} x  {row['winner']}{rounding}")
        if row["note"]:
            print(f"{'':<{width}}          {row['note']}")
        for label, reason in row["refusals"].items():
            print(f"{'':<{width}}          not {label}: {reason}")


def explain(tracer: Tracer) -> list[dict[str, Any]]:
    """Return one row per op and winner, in the order of the model's calls."""
    rows: list[dict[str, Any]] = []
    for op, choices in tracer.choices.items():
        merged: dict[str, dict[str, Any]] = {}
        for key, choice in choices.items():
            row = merged.setdefault(
                choice.winner,
                {
                    "op": op,
                    "sites": 0,
                    "how": choice.how,
                    "winner": choice.winner,
                    "inputs": choice.kernel.activation_quant if choice.kernel else "",
                    "note": choice.kernel.note if choice.kernel else "",
                    "refusals": dict(choice.refusals),
                },
            )
            row["sites"] += tracer.counts.get((op, key), 0)
        rows += (row for row in merged.values() if row["sites"])
    return rows
