"""``inl explain``: the kernel of each op, the refused ones, and roofline costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from inl.backend.base import Ranks
from inl.cli import arguments
from inl.config import EngineConfig
from inl.errors import BackendUnavailable, RequestError
from inl.executor.load_plan import LoadPlan, configure
from inl.executor.model_executor import bound_tracer
from inl.executor.model_loader import LanguageModel, open_model
from inl.plugin import make_backend
from inl.scheduling.buckets import Buckets
from inl.spec.dispatch import Tracer
from inl.spec.step import SAMPLERS, Bucket
from inl.weights.hub import resolve_model
from inl.weights.peft import highest_rank
from inl.workers.startup import over_mesh

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.limits import Limits


class ExplainedStep(NamedTuple):
    """A step of an engine, traced with the kernels that its program binds."""

    plan: LoadPlan
    tracer: Tracer
    draft_head: Tracer | None = None
    """Both steps of the draft head."""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.plan.limits.max_blocks_per_seq * self.plan.limits.block_size


def run(
    model: arguments.Model = None,
    device: arguments.Device = "auto",
    dtype: arguments.Dtype = "auto",
    kv_dtype: arguments.KvDtype = "auto",
    quantize: arguments.Quantize = None,
    tensor_parallel: arguments.TensorParallel = 1,
    mesh: arguments.Mesh = None,
    adapter: arguments.Adapter = None,
    speculation: arguments.Speculation = None,
    draft_model: arguments.DraftModel = None,
    allow_hosted: arguments.AllowHosted = False,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Only batch-invariant kernels.")
    ] = False,
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
    """Show the kernels of a step of an engine. Loads no weights."""
    if sampler not in SAMPLERS:
        raise RequestError(
            f"sampler: found {sampler!r:.80}, accepted: {', '.join(SAMPLERS)}"
        )
    for name, value in (("bandwidth", bandwidth), ("peak", peak)):
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"{name}: found {value}, accepted: a number above 0")
    adapters = arguments.adapters(adapter)
    config = EngineConfig(
        backend=device, dtype=dtype, kv_dtype=kv_dtype, quantize=quantize,
        tensor_parallel=tensor_parallel, mesh=mesh, adapters=adapters,
        max_adapter_rank=max(map(highest_rank, adapters.values()), default=1),
        speculation=speculation, draft_model=draft_model, allow_hosted=allow_hosted,
        invariant=invariant, context=context,
    )  # fmt: skip
    backend = open_backend(config)  # raises before a model is downloaded
    size = Bucket(tokens, min(rows, tokens), sampler=sampler)
    step = explain_step(open_model(resolve_model(model)), backend, config, size)
    report = _report(step)
    if cost:
        from inl.cli.explain_cost import cost_report

        report["cost"] = cost_report(step, bandwidth, peak)
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


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


def _print(report: dict[str, Any]) -> None:
    bucket = Bucket(**report["bucket"])
    print(
        f"{report['device']}, a step of {bucket.tokens} "
        f"token{'s'[: bucket.tokens > 1]} in {bucket.rows} "
        f"row{'s'[: bucket.rows > 1]} ({bucket.sampler})"
    )
    for note in report["weights"]:
        print(f"weights: {note}")
    for name, key in (("KV cache", "cache"), ("layers", "layers")):
        if report[key]:
            print(f"{name}: {report[key]}")
    if "cost" in report:
        from inl.cli.explain_cost import show_costs

        show_costs(report["cost"])
        return
    _show(report["ops"])
    if "draft_head" in report:
        print("draft head:")
        _show(report["draft_head"])


def _show(table: list[dict[str, Any]]) -> None:
    width = max(len(row["op"]) for row in table)
    for row in table:
        rounding = f", inputs {row['inputs']}" if row["inputs"] else ""
        print(f"{row['op']:<{width}}  {row['sites']:>4} x  {row['winner']}{rounding}")
        if row["note"]:
            print(f"{'':<{width}}          {row['note']}")
        for label, reason in row["refusals"].items():
            print(f"{'':<{width}}          not {label}: {reason}")


def open_backend(config: EngineConfig) -> Backend:
    """Open the device, or the mesh, of an engine's config.

    Raises :class:`~inl.errors.BackendUnavailable` for a device without ranks or meshes.
    """
    backend = over_mesh(make_backend(config.backend), config.mesh)
    if config.tensor_parallel > 1 and backend.offers(Ranks) is None:
        raise BackendUnavailable(
            f"{backend.device}: {type(backend).__name__} does not support "
            f"{config.tensor_parallel} ranks; accepted: tensor_parallel=1"
        )
    return backend


def explain_step(
    language: LanguageModel, backend: Backend, config: EngineConfig, size: Bucket
) -> ExplainedStep:
    """Trace the step of an engine that has the tokens and rows of ``size``.

    Its batch and budget are at least those of ``size``. Of a tensor-parallel group it
    is the step of a rank. Raises :class:`~inl.errors.RequestError` where programs have
    room for fewer tokens or rows, and as
    :meth:`~inl.executor.load_plan.LoadPlan.of` does.
    """
    traits = backend.traits
    config = replace(
        config, max_batch=max(size.rows, traits.max_batch),
        token_budget=max(size.tokens, traits.token_budget),
    )  # fmt: skip
    if config.speculation != "eagle" or config.draft_model is None:
        plan = LoadPlan.of(language, backend, config)
        return ExplainedStep(plan, plan.tracer(_program(plan.limits, size)))
    from inl.engine.drafting import check_speculation, head_place
    from inl.executor.draft_head import head_limits, open_head, plan_head

    language = configure(language, config)
    check_speculation(language, config)
    head = open_head(resolve_model(config.draft_model), language)
    plan = LoadPlan.of(replace(language, taps=head.config.taps), backend, config)
    place = head_place(language.name, config, plan.limits)
    limits = head_limits(head, plan.backend, plan.limits, **place)
    own = _program(limits, size._replace(sampler="greedy"))
    return ExplainedStep(
        plan, plan.tracer(_program(plan.limits, size)),
        bound_tracer(plan_head(head, plan.unloaded), own, limits),
    )  # fmt: skip


def _program(limits: Limits, size: Bucket) -> Bucket:
    """Return the bucket of the program that an engine uses for a step."""
    rows = limits.slots - 1
    sizes = Buckets(limits, token_budget=limits.token_budget, max_rows=rows)
    if size.tokens > sizes.tokens or size.rows > sizes.rows:
        raise RequestError(
            f"step: found {size.tokens} tokens in {size.rows} rows, accepted: up to "
            f"{sizes.tokens} tokens and {sizes.rows} rows on this device"
        )
    return sizes.choose(size.tokens, size.rows, size.sampler)


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
