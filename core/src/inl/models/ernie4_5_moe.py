"""ERNIE 4.5 with experts (Baidu, 2025): ranked by probabilities with a bias.

Layers before the first with experts are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray
from inl.models import ernie4_5, llama, moe, sigmoid_moe
from inl.models.config import refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed

DEFAULTS: Final = {
    "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536,
    "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip
"""Defaults of config fields that differ from those of ERNIE 4.5 without experts."""
RENAMES: Final = {
    r"^(model\.)?mtp.*$": "",
    r"\.mlp\.(gate\.)?moe_statics\.": ".mlp.gate.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name, accepted in (("use_bias", False), ("moe_norm_min", 1e-12)):
        refuse_unless(hf, name, accepted)
    base = ernie4_5.config(hf)
    size = whole(hf, "moe_intermediate_size")
    found = moe.with_experts(
        base, changed(hf, num_experts_per_tok=hf["moe_k"]), count="moe_num_experts",
        expert_size=size, dense_layers=_dense_layers(hf, base.layers),
        shared_size=size * whole(hf, "moe_num_shared_experts", least=0),
    )  # fmt: skip
    return replace(found, grouping=moe.Grouping("softmax", 1, 1, 1))


def _dense_layers(hf: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    first = whole(hf, "moe_layer_start_index", least=0)
    last = whole(hf, "moe_layer_end_index", least=-1)
    sparse = range(first, (layers if last < 0 else last + 1))
    step = whole(hf, "moe_layer_interval")
    return tuple(i for i in range(layers) if i not in sparse or (i + 1) % step)


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    return ernie4_5.interleaved(c, sigmoid_moe.weights(c))


def adapt(
    c: moe.MoeConfig, checkpoint: Checkpoint
) -> tuple[moe.MoeConfig, AdaptedCheckpoint]:
    """Rename tensors, and leave out the layers that predict further tokens."""
    return c, renamed(checkpoint, RENAMES, _split)


def _split(name: str, new: str, shape: tuple[int, ...]) -> dict[str, Piece] | None:
    """Return biases of ranks, stored as [1, E], as [E]."""
    if new.endswith("e_score_correction_bias") and len(shape) > 1:
        return {new: Piece((name,), shape[1:], lambda stored: _row(stored[0]))}
    return None


def _row(array: HostArray) -> HostArray:
    return HostArray(array.data[0], array.dtype, array.shape[1:])


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=moe.layer, adapt=adapt
)
