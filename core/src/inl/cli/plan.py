"""``inl plan``: how a model is divided among devices, and the memory of each part."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from inl.cli import arguments
from inl.cli.table import print_table
from inl.config import EngineConfig
from inl.dtypes import SIZES
from inl.errors import RequestError
from inl.spec.cache import Paged, Slotted

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.executor.model_loader import LanguageModel
    from inl.executor.planner import Parallelism

CACHE_SIZES = {**SIZES, "fp8": 1}
"""Bytes per number of a cache."""

COUNTED = re.compile(r"(\d+)x(\d+(?:\.\d+)?)(?:GB)?", re.IGNORECASE)
ACCEPTED = 'accepted: such as "4x80GB", "cpu" or "cuda:0,cuda:1"'


class Devices(NamedTuple):
    """Equal devices; ``memory_gb`` is of one, the least of several."""

    number: int
    memory_gb: float
    kind: str | None = None
    """Of devices here whose runtime the planner knows."""
    backend: Backend | None = None
    """Of a single device here."""


class DraftBytes(NamedTuple):
    """Memory of a layer that predicts further tokens, 0 without one."""

    weights: int = 0
    token: int = 0
    """Of its keys and values of one token."""


def run(
    model: arguments.ModelArgument = None,
    devices: Annotated[
        str, typer.Option(help='Such as "4x80GB", or the names of devices here.')
    ] = "auto",
    batch: Annotated[
        int, typer.Option(help="Sequences on each copy of the model.", min=1)
    ] = 1,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of each sequence; the model's limit if none.", min=1),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights; auto is as stored.")
    ] = "auto",
    kv_dtype: arguments.KvDtype = "bfloat16",
    quantize: arguments.Quantize = None,
    training: Annotated[
        bool, typer.Option("--training", help="Add gradients and Adam's state.")
    ] = False,
    expert_copies: Annotated[
        int,
        typer.Option(
            metavar="N", help="Copies of experts in each layer of a device.", min=0
        ),
    ] = 0,
    as_json: arguments.Json = False,
) -> None:
    """Show how devices divide a model; loads no weights."""
    from inl.executor.planner import GB, get_optimal_parallelism

    found = _devices(devices)
    facts, planned_context, drafts = _facts(model, dtype, kv_dtype, quantize, context)
    plan = get_optimal_parallelism(
        num_devices=found.number, memory_per_device_gb=found.memory_gb,
        training=training, batch=batch, context=planned_context,
        device=found.kind, expert_copies=expert_copies, **facts,
    )  # fmt: skip
    if plan.placement.count == 1 and not training:
        tokens = batch * planned_context
        plan = replace(plan, draft_bytes=drafts.weights + tokens * drafts.token)
    evicted = _evicted_bytes(found.backend, plan.kv_bytes)
    token = _token_bytes(facts)
    if as_json:
        more = {
            "context": planned_context, "placement": str(plan.placement),
            "kv_host_bytes": evicted, "kv_bytes_per_token": token,
        }  # fmt: skip
        print(json.dumps({**more, **facts, **asdict(plan)}))
        return
    _show(plan, found, batch, planned_context)
    if evicted:
        print(
            "- blocks that the cache has no room for take up to "
            f"{evicted / GB:,.3f} GB of host memory: --kv-host"
        )
    if plan.data_parallel > 1 and token and not training:
        print(
            "- prompts computed on another device (--role): contents of "
            f"{token:,} bytes a token, so that a link of 1 GB/s carries prompts of "
            f"{GB / token:,.0f} tokens/s; two whole engines serve more requests, "
            "unless long prompts must not delay the tokens of others, and the link "
            "carries what one device computes"
        )
    if facts["state_bytes"]:
        print(
            f"- each snapshot of recurrent state takes {facts['state_bytes']:,} bytes "
            "of host memory, within --snapshot-host"
        )
    if plan.draft_bytes:
        print("- the layer that predicts further tokens: none with --speculation none")


def _devices(text: str) -> Devices:
    """Parse a number of devices and their memory, or ask the devices of this machine.

    Raises :class:`~inl.errors.RequestError`, or the errors of opening a device.
    """
    from inl.executor.planner import GB, RUNTIMES
    from inl.plugin import make_backend

    counted = COUNTED.fullmatch(text.strip())
    if counted:
        count, memory = int(counted[1]), float(counted[2])
        if not count or not memory:
            raise RequestError(f"devices: found {text!r:.80}, {ACCEPTED}")
        return Devices(count, memory)
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise RequestError(f"devices: found {text!r:.80}, {ACCEPTED}")
    backends = [make_backend(name) for name in names]
    totals = [backend.memory().total for backend in backends]
    kinds = {str(backend.device.type) for backend in backends}
    kind = kinds.pop() if len(kinds) == 1 else None
    return Devices(
        len(names), min(totals) / GB, kind if kind in RUNTIMES else None,
        backends[0] if len(names) == 1 else None,
    )  # fmt: skip


def _evicted_bytes(backend: Backend | None, cache: int) -> int:
    """Return the host memory that an engine on a device here takes unasked.

    For blocks that a cache of so many bytes has no room for; 0 for several devices.
    """
    from inl.backend.block_io import BlockIO, plain_memory
    from inl.backend.host import is_host_memory
    from inl.kv_tiers.host_size import automatic_bytes, free_bytes

    if backend is None:
        return 0
    io, is_shared = backend.offers(BlockIO), is_host_memory(backend)
    if not is_shared and (io is None or io.empty is plain_memory):
        return 0
    return automatic_bytes(free_bytes(), cache, is_shared=is_shared)


def _token_bytes(facts: dict[str, Any]) -> int:
    """Return the bytes of the keys and values of one token, without scales."""
    numbers = 2 * facts["layers"] * facts["kv_heads"] * facts["head_dim"]
    return int(numbers * facts["kv_bytes_per_value"])


def _facts(
    model: str | None,
    dtype: str,
    kv_dtype: str,
    quantize: str | None,
    context: int | None,
) -> tuple[dict[str, Any], int, DraftBytes]:
    """Return the planner's arguments for a model, the context in tokens, and what a
    layer takes that predicts further ones.
    """
    from inl.backend.state_bytes import array_bytes
    from inl.checkpoints.blocks.dtypes import packed_bytes
    from inl.checkpoints.hub.resolve import resolve_model
    from inl.executor.load_plan import configure
    from inl.executor.model_loader import longest_context, open_model
    from inl.weights.load import stored_specs
    from inl.weights.plan import DRAFTING

    _check_dtypes(dtype, kv_dtype, quantize)
    config = EngineConfig(quantize=quantize)
    language = configure(open_model(resolve_model(model)), config)
    specs = [
        spec
        for name, spec in stored_specs(language.checkpoint).items()
        if not name.startswith(DRAFTING)
    ]
    params = sum(math.prod(spec.shape) for spec in specs)
    stored = sum(packed_bytes(spec.shape, spec.dtype) for spec in specs)
    shaped = replace(language.config, dtype="float32")
    state = language.model.state(shaped)
    groups = [item for item in state if isinstance(item, Paged)]
    widest = max(groups, key=lambda group: len(group.layers))
    facts = {
        "model_size_params": params,
        "bytes_per_param": stored / params if dtype == "auto" else SIZES[dtype],
        "kv_bytes_per_value": CACHE_SIZES[kv_dtype],
        "layers": sum(len(group.layers) for group in groups),
        "hidden": int(language.checkpoint.config["hidden_size"]),
        "heads": language.checkpoint.config.get("num_attention_heads"),
        "kv_heads": widest.kv_heads,
        "head_dim": widest.head_dim,
        "inner": _inner(language.checkpoint.config),
        "vocab": shaped.vocab_size,
        "state_bytes": sum(
            array_bytes(item.shape, item.dtype)
            for item in state
            if isinstance(item, Slotted)
        ),
        "tied": bool(getattr(shaped, "tied", False)),
        **_experts(language.model.weights(shaped)),
    }
    limit = longest_context(language)
    drafts = _draft_bytes(language, dtype, CACHE_SIZES[kv_dtype])
    language.checkpoint.close()
    return facts, min(context or limit, limit), drafts


def _draft_bytes(language: LanguageModel, dtype: str, cache_size: int) -> DraftBytes:
    from inl.backend.state_bytes import array_bytes
    from inl.checkpoints.blocks.dtypes import packed_bytes
    from inl.speculation.setup import find_default_head
    from inl.weights.load import stored_specs

    head = find_default_head(language)
    if head is None:
        return DraftBytes()
    (group,) = head.module.state(head.config)
    weights = sum(
        packed_bytes(spec.shape, spec.dtype)
        if dtype == "auto"
        else array_bytes(spec.shape, dtype)
        for spec in stored_specs(head.checkpoint).values()
    )
    return DraftBytes(weights, 2 * group.kv_heads * group.head_dim * cache_size)


def _experts(tree: Any) -> dict[str, int]:
    """Return the number of experts of a layer, and the parameters of all."""
    from inl.placement.mesh import EXPERT_OPS
    from inl.spec.tree import leaves

    shapes = [
        param.shape
        for group in leaves(tree)
        if group.op in EXPERT_OPS
        for param in group.params.values()
    ]
    count = math.gcd(*(shape[0] for shape in shapes)) if shapes else 1
    return {"experts": count, "expert_params": sum(map(math.prod, shapes))}


def _check_dtypes(dtype: str, kv_dtype: str, quantize: str | None) -> None:
    for name, value, sizes in (
        ("dtype", dtype, SIZES), ("kv-dtype", kv_dtype, CACHE_SIZES),
    ):  # fmt: skip
        if value not in sizes and (name, value) != ("dtype", "auto"):
            raise RequestError(
                f"{name}: found {value!r:.80}, accepted: {', '.join(sizes)}"
            )
    if quantize is not None and dtype != "auto":
        raise RequestError(
            f"dtype: found {dtype!r} with --quantize {quantize}, accepted: auto"
        )


def _inner(config: Any) -> int | None:
    """Return the width of the feed-forward of a token: of its experts together."""
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
    return inner and int(inner) * int(config.get("num_experts_per_tok") or 1)


def _show(plan: Parallelism, devices: Devices, batch: int, context: int) -> None:
    from inl.executor.planner import GB

    print(
        f"{devices.number} x {devices.memory_gb:.1f} GB, {batch} x {context} tokens on "
        f"each copy: tensor parallel {plan.tensor_parallel}, pipeline parallel "
        f"{plan.pipeline_parallel}, expert parallel {plan.expert_parallel}, "
        f"{plan.data_parallel} "
        f"{'copy' if plan.data_parallel == 1 else 'copies'}"
    )
    print(f"each copy: --placement {plan.placement}")
    parts = {
        "weights": plan.weight_bytes,
        "keys and values": plan.kv_bytes,
        "recurrent state": plan.state_bytes,
        "layer of further tokens": plan.draft_bytes,
        "activations": plan.activation_bytes,
        "gradients": plan.gradient_bytes,
        "optimizer": plan.optimizer_bytes,
        "runtime": plan.runtime_bytes,
        "total": plan.total_bytes,
        "available": plan.budget_bytes,
    }
    rows = [
        (name, f"{count / GB:,.3f} GB", f"{count / plan.budget_bytes:.1%}")
        for name, count in parts.items()
        if count
    ]
    print_table(("on each device", "memory", "of available"), rows)
    for reason in plan.reasons:
        print(f"- {reason}")
