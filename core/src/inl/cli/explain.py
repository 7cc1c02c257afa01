"""``inl explain``: which kernel computes each op, and why each other one lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from inl.cli import arguments
from inl.config import EngineConfig
from inl.executor.cache_sizing import plan_limits
from inl.executor.model_loader import (
    compute_dtype,
    in_dtype,
    kernel_selection,
    open_model,
)
from inl.executor.tracing import trace
from inl.plugin import make_backend
from inl.spec.dispatch import Tracer
from inl.spec.step import Bucket
from inl.weights.hub import resolve_model
from inl.weights.loader import stored_specs
from inl.weights.plan import plan_weights


def run(
    model: arguments.Model = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens in the step.", min=1)] = 1,
    rows: Annotated[int, typer.Option(help="Sequences in the step.", min=1)] = 1,
    sampler: Annotated[str, typer.Option(help="greedy or draw.")] = "greedy",
    as_json: arguments.Json = False,
) -> None:
    """Show the kernels that a step of a model would use; loads no weights."""
    bucket = Bucket(tokens, min(rows, tokens), sampler=sampler)
    config = EngineConfig(backend=device, dtype=dtype, max_batch=max(rows, 1))
    traced, where = _trace(model, config, bucket)
    table = explain(traced)
    if as_json:
        print(json.dumps({"device": where, "bucket": bucket._asdict(), "ops": table}))
        return
    print(f"{where}, a step of {tokens} tokens in {bucket.rows} rows ({sampler})")
    width = max(len(row["op"]) for row in table)
    for row in table:
        held = f", inputs {row['inputs']}" if row["inputs"] else ""
        print(f"{row['op']:<{width}}  {row['sites']:>4} x  {row['winner']}{held}")
        for label, reason in row["refusals"].items():
            print(f"{'':<{width}}          not {label}: {reason}")


def _trace(
    model: str | None, config: EngineConfig, bucket: Bucket
) -> tuple[Tracer, str]:
    backend = make_backend(config.backend)  # before a model is fetched for nothing
    language = open_model(resolve_model(model))
    dtype = compute_dtype(backend, config.dtype)
    backend = in_dtype(backend, dtype)
    shaped = replace(language.config, dtype=dtype)
    policy = kernel_selection(backend, config)
    stored = stored_specs(language.checkpoint)
    groups = plan_weights(language.model.weights(shaped), policy.kernels, stored)
    limits = plan_limits(language.model, shaped, backend, config)
    traced = trace(language.model, shaped, groups, bucket, limits, policy)
    return traced, str(backend.device)


def explain(traced: Tracer) -> list[dict[str, Any]]:
    """One row per op and choice, in the order in which the model meets them."""
    rows: list[dict[str, Any]] = []
    for op, choices in traced.choices.items():
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
                    "refusals": dict(choice.refusals),
                },
            )
            row["sites"] += traced.counts[op, key]
        rows += merged.values()
    return rows
