"""BioGPT (Luo et al., 2022): OPT with scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, gpt2, llama, opt
from inl.models.config import flag
from inl.models.fields import with_defaults
from inl.models.renames import renamed
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "gelu",
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
RENAMES: Final = {
    r"^biogpt\.": "model.",
    r"^output_projection\.": "lm_head.",
    r"^model\.layer_norm\.": "model.norm.",
    **opt.RENAMES,
}
"""Parts of tensor names, as patterns, and what they are in this file."""


@dataclass(frozen=True, slots=True)
class BioConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    embed_scale: float = 1.0


def config(hf: Mapping[str, Any]) -> BioConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in ("layerdrop", "activation_dropout", "layer_norm_eps"):
        hf.get(name)  # no effect on the results
    base = opt.positioned(hf, rms_norm_eps=opt.NORM_EPS)
    scaled = flag(hf, "scale_embedding", True)
    scale = base.hidden_size**0.5 if scaled else 1.0
    return llama.extended(BioConfig, base, embed_scale=scale)


def embed(ops: Ops, c: BioConfig, w: gpt2.Weights, step: Step) -> blocks.Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    places = ops.embedding(step.positions, w.positions)
    return carry._replace(residual=carry.residual * c.embed_scale + places)


def adapt(c: BioConfig, checkpoint: Checkpoint) -> tuple[BioConfig, AdaptedCheckpoint]:
    """Rename tensors."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(opt.MODEL, config=config, embed=embed, adapt=adapt)
