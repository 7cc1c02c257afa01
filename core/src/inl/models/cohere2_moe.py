"""Command with experts (Cohere, 2026): as Command A, with experts beside attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import blocks, cohere, deepseek, groups, layer_norm, llama, mlp, moe
from inl.models.config import MAX_EPS, flag, number, one_of, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.views import views, windows
from inl.spec.cache import State
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    **cohere.DEFAULTS, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
PERIOD: Final = 4
"""Default period of layers without a window."""
THETA: Final = 10000.0
SELECTIONS: Final = {"softmax": "softmax", "sigmoid": "sigmoid"}
COMBINATIONS: Final = {"average": "average", "sum": "sum"}


@dataclass(frozen=True, slots=True)
class CohereMoeConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    logit_scale: float = 1.0
    selection: str = "softmax"
    """How scores of the chosen experts become shares."""
    average: bool = True
    """Whether experts and the shared one are averaged, not added."""
    dense_size: int = 0
    """Inner size of layers without experts."""


def config(hf: Mapping[str, Any]) -> CohereMoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "rms_norm_eps", None)
    # transformers reads the rotation of this family from rope_parameters only.
    refuse_unless(hf, "rope_scaling", None)
    refuse_unless(hf, "mlp_bias", False)
    eps = number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS)
    base = llama.config(changed(hf, rms_norm_eps=eps), theta=THETA)
    shared = whole(hf, "num_shared_experts", 0, least=0)
    dense = whole(hf, "first_k_dense_replace", 0, least=0, most=base.layers)
    early = whole(hf, "prefix_dense_sliding_window_pattern", 1)
    period = whole(hf, "sliding_window_pattern", PERIOD)
    names = "sliding_attention", "full_attention"
    kinds = [names[(index + 1) % early == 0] for index in range(dense)]
    kinds += [names[(index + 1) % period == 0] for index in range(base.layers - dense)]
    found = windows(hf, kinds)
    sparse = moe.with_experts(
        base, hf, count="num_experts", expert_size=base.intermediate_size,
        renormalize=flag(hf, "norm_topk_prob", True), dense_layers=tuple(range(dense)),
        shared_size=base.intermediate_size * shared,
    )  # fmt: skip
    sparse = deepseek.with_kinds(hf, sparse)
    turned = [
        window is not None or (early == 1 and index in sparse.dense_layers)
        for index, window in enumerate(found)
    ]
    given = {} if hf.get("prefix_dense_intermediate_size") is not None else {
        "prefix_dense_intermediate_size": base.intermediate_size
    }  # fmt: skip
    hf = changed(hf, **given)
    combination = one_of(hf, "shared_expert_combination_strategy", COMBINATIONS)
    return llama.extended(
        CohereMoeConfig,
        replace(sparse, views=views(found, turned)),
        logit_scale=number(hf, "logit_scale", 0.0625),
        selection=one_of(hf, "expert_selection_fn", SELECTIONS),
        average=combination == "average",
        dense_size=whole(hf, "prefix_dense_intermediate_size"),
    )


def weights(c: CohereMoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = cohere.weights(c)
    layers = list(tree.layers)
    for index, layer in enumerate(layers):
        at, inner = f"model.layers.{index}.", layer.mlp
        if index in c.dense_layers:
            dense = replace(c, intermediate_size=c.dense_size)
            inner = inner._replace(mlp=mlp.weights(dense, f"{at}mlp"))
        else:
            inner = _mixture(c, at)
        layers[index] = layer._replace(mlp=inner)
    return tree._replace(layers=tuple(layers))


def _mixture(c: CohereMoeConfig, at: str) -> moe.Moe:
    stem = f"{at}mlp.experts"
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    found = moe.Moe(
        None,
        moe.router(c, f"{at}mlp.gate.weight"),
        moe.expert_group(c, stem, stem, **names),
        bias=moe.no_bias(c, at),
    )
    if not c.shared_size:
        return found
    shared = groups.gated(f"{at}mlp.shared_experts", c.hidden_size, c.shared_size)
    return found._replace(shared=shared)


def layer(
    ops: Ops, c: CohereMoeConfig, w: llama.Layer, carry: Any, step: Step, state: State,
    *, index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention and feed-forward block of the same residual, with one norm."""
    x, carry, state = layer_norm.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    if sampled_step is not None:
        x = ops.take_rows(x, step.samples)
    if isinstance(w.mlp, moe.Moe):
        inner = mixture(ops, c, w.mlp, x)
    else:
        inner = mlp.feed_forward(ops, x, w.mlp.mlp, c.activation)
    return carry._replace(delta=carry.delta + inner), state


def mixture(ops: Ops, c: CohereMoeConfig, w: moe.Moe, x: Array) -> Array:
    """Return this rank's sum of experts, [T, H]."""
    logits = ops.linear(x, w.router)
    if c.selection == "softmax":
        ids, shares = ops.route(
            logits, k=c.experts_per_token, kind="topk_softmax", renormalize=False
        )
    else:
        bias = w.bias
        assert bias is not None, "every mixture declares one"
        ids, shares = ops.group_route(
            logits, bias, k=c.experts_per_token, kind="sigmoid", groups=1, chosen=1,
            best_of=1, renormalize=c.renormalize,
        )  # fmt: skip
    delta = ops.experts(x, ids, shares, w.experts, activation=c.activation)
    if w.shared is None:
        return delta
    delta = delta + ops.gated_mlp(x, w.shared, activation=c.activation)
    return delta * 0.5 if c.average else delta


def head(ops: Ops, c: CohereMoeConfig, w: Any, carry: Any, step: Step) -> Array:
    return layer_norm.head(ops, c, w, carry, step) * c.logit_scale


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=layer, head=head)
