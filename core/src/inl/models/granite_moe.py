"""Granite 3 mixtures (IBM, 2024): Granite with experts, and maybe a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from inl.models import granite, groups, llama, moe
from inl.models.config import whole
from inl.models.fields import with_defaults
from inl.spec.weights import FusedSlice, Group, Param

DEFAULTS: Final = {"num_local_experts": 8, "num_experts_per_tok": 2}
"""Defaults of config fields that differ from Granite's."""


@dataclass(frozen=True, slots=True)
class GraniteMoeConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    embed_scale: float = 1.0
    block_scale: float = 1.0
    """Factor on the output of every block."""
    logit_scale: float = 1.0


def config(hf: Mapping[str, Any]) -> GraniteMoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = llama.config(hf)
    sparse = moe.with_experts(
        base, hf, count="num_local_experts", expert_size=base.intermediate_size,
        shared_size=whole(hf, "shared_intermediate_size", 0, least=0),
    )  # fmt: skip
    return llama.extended(GraniteMoeConfig, sparse, **granite.factors(hf))


def weights(c: GraniteMoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return moe.weights(c, feed_forward)


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the mixture of the layer with name prefix ``at``."""
    stem = f"{at}block_sparse_moe"
    return moe.Moe(
        norm,
        moe.router(c, f"{stem}.router.layer.weight", f"{stem}.router.weight"),
        _experts(c, stem),
        shared(c, f"{at}shared_mlp") if c.shared_size else None,
    )


def _experts(c: moe.MoeConfig, stem: str) -> Group:
    """Return the experts, whose gates and ups are the halves of one tensor."""
    count, inner, h = c.experts, c.expert_size, c.hidden_size

    def named(name: str, new: str, form: Param, own: str = "") -> Param:
        other = form._replace(source=f"{stem}.experts.{new}")
        found = form._replace(source=f"{stem}.{name}.weight", aliases=(other,))
        if own:
            # Of GGUF files, which divide the fused matrices.
            apart = form._replace(source=f"{stem}.experts.{own}", fused_slice=None)
            found = found._replace(aliases=(other, apart))
        return found

    gate, up = (
        Param("", (count, inner, h), axis=1, fused_slice=FusedSlice(1, index, 2))
        for index in range(2)
    )
    down = Param("", (count, h, inner), axis=2)
    return Group(
        "experts",
        gate=named("input_linear", "gate_up_proj", gate, "gate_proj.weight"),
        up=named("input_linear", "gate_up_proj", up, "up_proj.weight"),
        down=named("output_linear", "down_proj", down),
    )


def shared(c: moe.MoeConfig, stem: str) -> Group:
    """Return the shared expert, stored as the others are."""
    inner, h = c.shared_size, c.hidden_size

    def part(name: str, first: int) -> Param:
        source, span = f"{stem}.input_linear.weight", ((first, first + inner),)
        fused = groups.rows(source, span, 2 * inner, h)
        # GGUF files divide the fused matrix.
        apart = Param(f"{stem}.{name}.weight", (inner, h), axis=0)
        return fused._replace(aliases=(apart,))

    gate, up = part("gate_proj", 0), part("up_proj", inner)
    down = Param(f"{stem}.output_linear.weight", (h, inner), axis=1)
    return Group("gated_mlp", gate=gate, up=up, down=down)


MODEL = replace(
    granite.MODEL,
    config=config,
    weights=weights,
    layer=partial(granite.scaled_layer, moe.feed_forward),
)
