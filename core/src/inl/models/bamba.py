"""Bamba (IBM, 2024): Llama's blocks with Mamba-2 in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, hybrid, llama, mamba2
from inl.models.config import whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed
from inl.models.rope import rope_fields
from inl.models.views import FULL
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "attn_layer_indices": None,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
HALF: Final = 0.5
"""Share of the lanes that rotate, unless the fields of the rotation have another."""
KINDS: Final = {"mamba": True, "attention": False}
"""Kinds of layers, and whether they are recurrent."""


@dataclass(frozen=True, slots=True)
class BambaConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    recurrent: tuple[bool, ...] = ()
    """Whether each layer is recurrent."""
    mamba: mamba2.Sizes | None = None


def config(hf: Mapping[str, Any]) -> BambaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = changed(with_defaults(hf, DEFAULTS), partial_rotary_factor=HALF)
    for name in ("num_logits_to_keep", "z_loss_coefficient"):
        hf.get(name)  # no effect on the logits
    base = llama.partly_rotated(hf, rope_fields(hf))
    listed = hf["attn_layer_indices"] or []
    types = hybrid.listed_kinds(listed, base.layers, KINDS, "attn_layer_indices")
    inner = whole(hf, "mamba_expand", 2) * base.hidden_size
    return llama.extended(
        BambaConfig, base, mamba=mamba2.read(hf, inner),
        recurrent=hybrid.recurrent_layers(
            types, base.layers, KINDS, "attn_layer_indices"
        ),
    )  # fmt: skip


def weights(c: BambaConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    tree = llama.weights(c)
    layers = tuple(
        mamba2.in_layer(c, index, layer) for index, layer in enumerate(tree.layers)
    )
    return tree._replace(layers=layers)


def layer(
    ops: Ops, c: BambaConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = mamba2.mixed(
        ops, c, w.attention, carry, step, state, index, FULL, sampled_step
    )
    return blocks.gated_mlp(ops, c, w.mlp, carry), state


def adapt(c: BambaConfig, checkpoint: Checkpoint) -> tuple[BambaConfig, Checkpoint]:
    """Rename tensors, and add the weights of norms, which are ones."""
    assert c.mamba is not None, "the config was read"
    found = renamed(checkpoint, mamba2.RENAMES)
    return c, mamba2.with_constants(c.mamba, found, hybrid.recurrent_indices(c))


MODEL = replace(
    llama.MODEL, config=config, weights=weights, state=mamba2.states, layer=layer,
    adapt=adapt,
)  # fmt: skip
