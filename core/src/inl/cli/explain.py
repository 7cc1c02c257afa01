"""``inl explain``: the kernel of each op, the refused ones, and roofline costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from inl.backend.base import WholeModels
from inl.checkpoints.hub.resolve import resolve_model
from inl.cli import arguments
from inl.config import EngineConfig
from inl.errors import RequestError
from inl.executor.cache_dtype import cache_dtype, caching_in
from inl.executor.cache_sizing import plan_limits
from inl.executor.model_loader import (
    compute_dtype,
    in_dtype,
    kernel_selection,
    open_model,
    stored_for,
)
from inl.executor.tracing import trace
from inl.plugin import make_backend
from inl.spec.dispatch import Tracer
from inl.spec.step import SAMPLERS, Bucket
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights
from inl.weights.quantize.select import decoded_note

if TYPE_CHECKING:
    from inl.backend.base import Backend


class TracedStep(NamedTuple):
    """A traced step and what its costs depend on."""

    tracer: Tracer
    backend: Backend
    context: int
    """Tokens of the longest sequence."""
    notes: tuple[str, ...] = ()
    """How quantized weights are loaded."""
    cache: str = ""
    """The dtype of the KV cache and who asks for it; empty for the compute dtype."""
    layers: str = ""
    """How the backend computes all layers at once, or why it does not."""


def run(
    model: arguments.Model = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    kv_dtype: arguments.KvDtype = "auto",
    quantize: arguments.Quantize = None,
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
    as_json: arguments.Json = False,
) -> None:
    """Show the kernels that a step of a model would use. Loads no weights."""
    if sampler not in SAMPLERS:
        raise RequestError(
            f"sampler: found {sampler!r:.80}, accepted: {', '.join(SAMPLERS)}"
        )
    for name, value in (("bandwidth", bandwidth), ("peak", peak)):
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"{name}: found {value}, accepted: a number above 0")
    bucket = Bucket(tokens, min(rows, tokens), sampler=sampler)
    config = EngineConfig(
        backend=device, dtype=dtype, kv_dtype=kv_dtype, quantize=quantize,
        max_batch=bucket.rows, context=context,
    )  # fmt: skip
    step = _trace(model, config, bucket)
    report: dict[str, Any] = {
        "device": str(step.backend.device),
        "bucket": bucket._asdict(),
        "ops": explain(step.tracer),
        "weights": list(step.notes),
        "cache": step.cache,
        "layers": step.layers,
    }
    if cost:
        from inl.cli.explain_cost import cost_report

        report["cost"] = cost_report(step, bandwidth, peak)
    if as_json:
        print(json.dumps(report))
        return
    print(
        f"{report['device']}, a step of {tokens} token{'s'[: tokens > 1]} in "
        f"{bucket.rows} row{'s'[: bucket.rows > 1]} ({sampler})"
    )
    for note in step.notes:
        print(f"weights: {note}")
    if step.cache:
        print(f"KV cache: {step.cache}")
    if step.layers:
        print(f"layers: {step.layers}")
    if cost:
        from inl.cli.explain_cost import show_costs

        show_costs(report["cost"])
    else:
        _show(report["ops"])


def _show(table: list[dict[str, Any]]) -> None:
    width = max(len(row["op"]) for row in table)
    for row in table:
        rounding = f", inputs {row['inputs']}" if row["inputs"] else ""
        print(f"{row['op']:<{width}}  {row['sites']:>4} x  {row['winner']}{rounding}")
        if row["note"]:
            print(f"{'':<{width}}          {row['note']}")
        for label, reason in row["refusals"].items():
            print(f"{'':<{width}}          not {label}: {reason}")


def _trace(model: str | None, config: EngineConfig, bucket: Bucket) -> TracedStep:
    backend = make_backend(config.backend)  # raises before a model is downloaded
    language = open_model(resolve_model(model))
    dtype = compute_dtype(backend, config.dtype)
    if config.quantize is not None:
        language = language.quantized(config.quantize)
    language = stored_for(language, backend, dtype)
    backend = in_dtype(backend, dtype)
    shaped = replace(language.config, dtype=dtype)
    selection = kernel_selection(backend, config)
    stored = stored_specs(language.checkpoint)
    groups = plan_weights(language.model.weights(shaped), selection.kernels, stored)
    cache = cache_dtype(backend, config.kv_dtype, language.checkpoint)
    cached = caching_in(language.model, cache, language.checkpoint)
    limits = plan_limits(cached, shaped, backend, config)
    tracer = trace(cached, shaped, groups, bucket, limits, selection)
    context = limits.max_blocks_per_seq * limits.block_size
    notes = language.checkpoint.notes
    if language.quantize and (note := decoded_note(groups, language.quantize)):
        notes = (*notes, note)
    whole, layers = backend.offers(WholeModels), ""
    if whole is not None and whole.describe is not None:
        layers = whole.describe(cached, shaped, groups, bucket, limits)
    return TracedStep(tracer, backend, context, notes, cache.note, layers)


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
            row["sites"] += tracer.counts[op, key]
        rows += merged.values()
    return rows
