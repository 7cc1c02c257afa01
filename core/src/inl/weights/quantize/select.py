"""Quantization of a model's matrices while they are loaded: which ones, and whether."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.quantized.kv_cache_scheme import FIELD
from inl.dtypes import FLOATS, SIZES
from inl.errors import RequestError
from inl.spec.op import Spec
from inl.spec.tree import is_named, leaves
from inl.spec.weights import Group, Param
from inl.weights.load import stored_specs
from inl.weights.plan import WeightPlan
from inl.weights.quantize.checkpoint import QuantizingCheckpoint
from inl.weights.quantize.report import KINDS
from inl.weights.sources import resolved, stored_tensors

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.spec.model import Model

OPS: Final = ("linear", "qkv_linear", "gated_mlp", "experts", "expert_linear")
"""Ops whose matrices are quantized, in layers only: not the embedding and the head."""
GATES: Final = ("router", "shared_gate")
"""Fields of layers whose matrices choose experts: small, and sensitive to rounding."""


def quantizing(
    model: Model, config: Any, checkpoint: Checkpoint, kind: str
) -> QuantizingCheckpoint:
    """Return the checkpoint with matrices of the model's layers quantized to ``kind``.

    Raises :class:`~inl.errors.RequestError` for an unknown kind and for a checkpoint
    that is quantized already.
    """
    if kind not in KINDS:
        raise RequestError(
            f"quantize: found {kind!r:.80}, accepted: {', '.join(KINDS)}"
        )
    names = layer_matrices(model, config, checkpoint, kind)
    return QuantizingCheckpoint(checkpoint, kind, names)


def layer_matrices(
    model: Model, config: Any, checkpoint: Checkpoint, kind: str
) -> tuple[str, ...]:
    """Return the names of the matrices of the layers, which ``kind`` quantizes.

    Raises :class:`~inl.errors.RequestError` for a checkpoint that is quantized already.
    """
    where = checkpoint.path.name
    stored = stored_specs(checkpoint)
    names = tuple(dict.fromkeys(_matrices(model.weights(config).layers, stored)))
    if form := _stored_format(checkpoint, {stored[name].dtype for name in names}):
        raise RequestError(
            f"quantize: found {kind!r}, but {where} is quantized already: {form}; "
            "accepted: None, or a checkpoint in float32, bfloat16 or float16"
        )
    return names


def load_notes(checkpoint: Checkpoint, plans: Any) -> Iterator[str]:
    """Yield a line for matrices that are not quantized, and for decoded ones."""
    if isinstance(checkpoint, QuantizingCheckpoint):
        yield from checkpoint.skip_notes()
        if note := decoded_note(plans, checkpoint.kind):
            yield note


def decoded_note(plans: Any, kind: str) -> str:
    """Return a line about matrices that no kernel packs, or an empty one."""
    count = sum(
        plan.kernel is None and dtype not in SIZES
        for plan in leaves(plans)
        if isinstance(plan, WeightPlan)
        for dtype in plan.stored.values()
    )
    if not count:
        return ""
    return (
        f"{kind}: {count} of the model's matrices are decoded to the compute dtype, "
        "because this device has no kernel that packs them; they take its memory"
    )


def _matrices(node: Any, stored: Mapping[str, Spec]) -> Iterator[str]:
    """Yield the stored names of the matrices below a node of the weight tree."""
    if isinstance(node, Group):
        if node.op in OPS:
            for param in resolved(node.params, stored).values():
                names = stored_tensors(param) if _is_matrix(param) else ()
                yield from (name for name in names if name in stored)
    elif is_named(node):
        for name, value in zip(node._fields, node, strict=True):
            if name not in GATES:
                yield from _matrices(value, stored)
    elif isinstance(node, (tuple, list)):
        for value in node:
            yield from _matrices(value, stored)


def _is_matrix(param: Param) -> bool:
    """Return whether a parameter can be in blocks along the last axis it is stored in.

    Biases of experts are rows of a matrix by their shape, but not by their name.
    """
    rank = len(param.shape)
    fused = param.fused_slice
    whole_rows = fused is None or fused.axis != rank - 1
    is_weight = rank > 1 and not param.source.endswith("bias")
    return is_weight and whole_rows and not param.offset and not param.wide


def _stored_format(checkpoint: Checkpoint, dtypes: set[str]) -> str:
    """Return the format of a quantized checkpoint; empty for floats."""
    if checkpoint.config.get(FIELD):
        method = checkpoint.config[FIELD].get("quant_method")
        return checkpoint.notes[0] if checkpoint.notes else f"{FIELD}: {method}"
    return ", ".join(sorted(dtypes - set(FLOATS)))
