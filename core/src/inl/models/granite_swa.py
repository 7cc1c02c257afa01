"""Granite with windows (IBM, 2026): attention sinks, a base frequency by layer.

Layers whose base is 0 do not rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import blocks, granite, llama
from inl.models.fields import with_defaults
from inl.models.views import views, windows
from inl.ops.rope import RopeScaling
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "sliding_window": 128,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
PERIOD: Final = 4
"""Default period of layers without a window, of which the first is one."""
MOST_BASES: Final = 2
"""Base frequencies that differ."""


@dataclass(frozen=True, slots=True)
class SwaConfig(granite.GraniteConfig):
    """Sizes and constants of one checkpoint."""

    local_rope: tuple[float, RopeScaling] | None = None
    """Base frequency and scaling of the layers ``local``."""
    local: tuple[int, ...] = ()


def config(hf: Mapping[str, Any]) -> SwaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = llama.config(hf)
    return llama.extended(SwaConfig, base, **granite.factors(hf), **rotation(hf, base))


def rotation(hf: Mapping[str, Any], c: llama.LlamaConfig) -> dict[str, Any]:
    """Read windows and bases of layers; raises :class:`CheckpointError`."""
    names = "sliding_attention", "full_attention"
    kinds = [names[index % PERIOD == 0] for index in range(c.layers)]
    given = hf.get("layer_rope_theta")
    bases = [c.rope_theta] * c.layers if given is None else given
    name = "config field 'layer_rope_theta'"
    if not isinstance(bases, (list, tuple)) or len(bases) != c.layers or any(
        type(each) not in (int, float) or each < 0 for each in bases
    ):  # fmt: skip
        raise CheckpointError(
            f"{name}: found {show(bases)}, expected {c.layers} numbers of 0 or more"
        )
    several = sorted({float(each) for each in bases if each})
    if len(several) > MOST_BASES:
        raise CheckpointError(
            f"{name}: found {len(several)} bases, accepted: at most {MOST_BASES} and 0"
        )
    found: dict[str, Any] = {
        "views": views(windows(hf, kinds), [bool(each) for each in bases])
    }
    if several:
        found["rope_theta"] = several[0]
    if len(several) > 1:
        found["local_rope"] = several[1], c.rope_scaling
        found["local"] = tuple(i for i in range(c.layers) if bases[i] == several[1])
    return found


def weights(c: Any) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return with_sinks(c, llama.weights(c))


def with_sinks(c: Any, tree: llama.Weights, *names: str) -> llama.Weights:
    """Return a tree with the attention sinks of all layers; names: others of theirs."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        first, *others = (
            Param(f"{at}self_attn.{name}", (c.heads,), axis=0)
            for name in ("sinks", *names)
        )
        group = Group("sink_attention", logits=first._replace(aliases=tuple(others)))
        return layer._replace(attention=layer.attention._replace(sinks=group))

    return llama.with_layers(tree, changed)


def embed(ops: Ops, c: Any, w: Any, step: Step) -> blocks.LocalCarry:
    carry = blocks.embed_local(ops, c, w.embed, step)
    return carry._replace(residual=carry.residual * c.embed_scale)


def layer(
    feed_forward: Callable[[Ops, Any, Any, Any], Any], ops: Ops, c: Any,
    w: llama.Layer, carry: Any, step: Step, state: State, *, index: int,
    sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    """Attention block, then ``feed_forward`` of ``w.mlp``, each with the factor."""
    own = carry
    if index in c.local:
        own = carry._replace(cos=carry.local_cos, sin=carry.local_sin)
    own, state = granite.scaled_layer(
        feed_forward, ops, c, w, own, step, state, index=index,
        sampled_step=sampled_step,
    )  # fmt: skip
    return carry._replace(residual=own.residual, delta=own.delta), state


MODEL = replace(
    granite.MODEL, config=config, weights=weights, embed=embed,
    layer=partial(layer, blocks.gated_mlp),
)  # fmt: skip
