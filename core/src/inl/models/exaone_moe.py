"""K-EXAONE (LG AI Research, 2026): EXAONE 4 with norms before blocks, and experts.

Sigmoid scores of experts have a bias of ranks; layers without a window do not rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import exaone4, llama, moe, sigmoid_moe
from inl.models.config import whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed

DEFAULTS: Final = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Defaults of config fields that differ from those of EXAONE 4."""
KINDS: Final = "sparse", "dense"
"""Accepted entries of ``mlp_layer_types``."""
RENAMES: Final = {
    r"^(model\.)?mtp\..*$": "",
    r"\.mlp\.e_score": ".mlp.gate.e_score",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = replace(exaone4.config(hf), head_norm=True)
    hf = changed(
        hf, n_routed_experts=whole(hf, "num_experts"),
        n_shared_experts=whole(hf, "num_shared_experts", least=0),
    )  # fmt: skip
    found = sigmoid_moe.sparse(base, hf, renormalize=True)
    kinds = hf.get("mlp_layer_types")
    return found if kinds is None else replace(found, dense_layers=_dense(kinds, found))


def _dense(kinds: Any, c: moe.MoeConfig) -> tuple[int, ...]:
    known = isinstance(kinds, (list, tuple)) and len(kinds) == c.layers
    if not known or any(kind not in KINDS for kind in kinds):
        raise CheckpointError(
            f"config field 'mlp_layer_types': found {show(kinds)}, expected a list of "
            f"{c.layers}, {' or '.join(KINDS)} for each layer"
        )
    return tuple(index for index, kind in enumerate(kinds) if kind == "dense")


def adapt(
    c: moe.MoeConfig, checkpoint: Checkpoint
) -> tuple[moe.MoeConfig, AdaptedCheckpoint]:
    """Rename tensors, and leave out the layers that predict further tokens."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=sigmoid_moe.weights, layer=moe.layer,
    adapt=adapt,
)  # fmt: skip
