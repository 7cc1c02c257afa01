"""Mutants of every family: our models with one feature of their config off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from families import WINDOW
from inl.models import (
    axk1,
    blocks,
    falcon_h1,
    gemma3n,
    gemma4,
    gptj,
    groups,
    hunyuan_v1_dense,
    layer_norm,
    lfm2,
    llama4,
    mamba2,
    moe,
    nemotron,
    nemotron_h,
    post_norm,
    qwen3_next,
    sparse_mla,
)
from inl.models.views import views
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling


@dataclass(frozen=True)
class Mutant:
    """A feature that is off: in our config, in what was loaded, or in our code."""

    config: Callable[[Any], Any] = lambda config: config
    weights: Callable[[Any], Any] = lambda weights: weights
    patch: tuple[Any, str, Any] | None = None


def field(**changes):
    return Mutant(lambda config: replace(config, **changes))


def scaling(**changes):
    return Mutant(lambda c: replace(c, rope_scaling=c.rope_scaling._replace(**changes)))


def seen(change):
    """Another window for each layer."""
    return Mutant(
        lambda c: replace(c, views=views([change(v.window) for v in c.views]))
    )


def in_layers(change):
    """Other tensors in every layer."""
    return Mutant(
        weights=lambda w: w._replace(layers=tuple(change(each) for each in w.layers))
    )


def without(*names):
    """Nothing in place of these norms of the attention block."""
    gone = dict.fromkeys(names)
    return in_layers(lambda w: w._replace(attention=w.attention._replace(**gone)))


def in_group(block, group, change):
    """Other tensors in one group of every layer."""

    def changed(layer):
        part = getattr(layer, block)
        new = part._replace(**{group: change(getattr(part, group))})
        return layer._replace(**{block: new})

    return in_layers(changed)


def in_xielu(**changes):
    """Other parameters of the activation of every layer."""

    def changed(layer):
        inner = layer.mlp.mlp
        new = {name: make(getattr(inner.xielu, name)) for name, make in changes.items()}
        inner = inner._replace(xielu=inner.xielu._replace(**new))
        return layer._replace(mlp=layer.mlp._replace(mlp=inner))

    return in_layers(changed)


def entered_plain(_ops, _config, carry, _norm):
    total = carry.residual + carry.delta
    return total, total


def left_plain(_ops, _config, delta, _norm):
    return delta


def rows_as_stored(dim, _rotary_dim, heads, *, start=0, interleaved=False):
    return ((start, start + heads * dim),)


def regrouped(**changes):
    return Mutant(lambda c: replace(c, grouping=c.grouping._replace(**changes)))


MIXTURE, ROUTED = moe.mixture, moe._routed


def without_shared(ops, c, w, carry):
    return MIXTURE(ops, c, w._replace(shared=None), carry)


def ranked_plainly(ops, c, w, logits):
    return ROUTED(ops, c, w._replace(bias=w.bias._replace(bias=None)), logits)


def in_kind(kind, **changes):
    """Other tensors in the first block of the layers where it is a ``kind``."""

    def changed(layer):
        part = layer.attention
        if not isinstance(part, kind):
            return layer
        new = {
            name: change and change(getattr(part, name))
            for name, change in changes.items()
        }
        return layer._replace(attention=part._replace(**new))

    return in_layers(changed)


in_recurrent = partial(in_kind, qwen3_next.Delta)
in_convolutions = partial(in_kind, lfm2.ShortConv)
in_attention = partial(in_kind, blocks.Attention)


def each_mixer(change):
    """Other weights in every layer of Mamba-2."""

    def changed(layer):
        if isinstance(layer, mamba2.Block | falcon_h1.Layer):
            return layer._replace(mixer=change(layer.mixer))
        if isinstance(getattr(layer, "attention", None), mamba2.Block):
            return layer._replace(attention=changed(layer.attention))
        return layer

    return in_layers(changed)


def in_mixers(**changes):
    """Other tensors in every layer of Mamba-2."""

    def changed(mixer):
        new = {name: each(getattr(mixer, name)) for name, each in changes.items()}
        return mixer._replace(**new)

    return each_mixer(changed)


def in_experts(**changes):
    """Other tensors in every mixture of experts without gates."""

    def changed(layer):
        if not isinstance(layer, nemotron_h.Mixture):
            return layer
        new = {name: each(getattr(layer, name)) for name, each in changes.items()}
        return layer._replace(**new)

    return in_layers(changed)


def of_part(name, field, change):
    """Other rows of what the convolution reads or returns, or of the gates."""

    def changed(mixer):
        inner, channels = mixer.out.weight.shape[1], len(mixer.taps.weight)
        keys = (channels - inner) // 2
        spans = {
            "gate": (0, inner), "value": (0, inner), "key": (inner, inner + keys),
            "query": (inner + keys, channels),
        }  # fmt: skip
        held = getattr(mixer, field)
        weight, part = held.weight.copy(), slice(*spans[name])
        weight[part] = change(weight[part])
        return mixer._replace(**{field: held._replace(weight=weight)})

    return each_mixer(changed)


def normed_whole(ops, _sizes, w, out, eps):
    return ops.rms_norm(out, w.norm, eps=eps)


GATED = qwen3_next.gated_attention


def ungated(ops, c, w, *rest):
    weight = 0 * w.gate.weight
    gate = w.gate._replace(weight=weight, bias=w.gate.bias * 0 + 50)
    return GATED(ops, c, w._replace(gate=gate), *rest)


def other_views(**changes):
    """Other views of the layers that rotate."""

    def changed(view):
        return view._replace(**changes) if view.rotated else view

    return Mutant(lambda c: replace(c, views=tuple(map(changed, c.views))))


def in_mixtures(change):
    def changed(layer):
        if not isinstance(layer.mlp, llama4.Mixture):
            return layer
        return layer._replace(mlp=change(layer.mlp))

    return in_layers(changed)


def scaled_after(ops, c, w, carry):
    """The mixture with factors on the outputs of experts, not on their inputs."""
    given = ops.combine_experts

    def combined(y, shares):
        inner = y.shape[1] == 1
        return given(y, shares * 0 + 1) if inner else given(y, chosen[-1])

    chosen = []

    def route(*args, **attrs):
        ids, shares = ops.route(*args, **attrs)
        chosen.append(shares)
        return ids, shares

    changed = SimpleNamespace(
        **{name: getattr(ops, name) for name in (
            "reduce_add_norm", "linear", "expert_linear", "gated_activation",
            "zeros_like", "gated_mlp")},
        combine_experts=combined, route=route,
    )  # fmt: skip
    return LLAMA4(changed, c, w, carry)


LLAMA4 = llama4.mixture


def entered_uncentered(ops, c, carry, w):
    total = carry.residual + carry.delta
    y = ops.rms_norm(total, Norm(w.weight), eps=c.norm_eps)
    return total, y if w.bias is None else y + w.bias


ROPE = {"theta": field(rope_theta=600.0)}
SCALED = {"scaling": field(rope_scaling=RopeScaling())}
WINDOWS = {
    "window": seen(lambda window: None),
    "window one wider": seen(lambda window: window and window + 1),
}
SPLIT = WINDOWS | {
    "which layers have a window": seen(lambda window: None if window else WINDOW)
}
NORMS = {"eps": field(norm_eps=0.3)}
SILU = {"activation": field(activation="gelu_tanh")}
GELU = {"activation": field(activation="silu")}
HEAD = {
    "head of its own": Mutant(
        weights=lambda w: w._replace(head=w.head._replace(weight=w.embed.weight))
    )
}
BIAS = {
    f"bias of {name}": in_group("attention", "qkv", lambda w, n=name: w._replace(
        **{f"{n}_bias": None}))
    for name in "qkv"
}  # fmt: skip


def without_k(mutants):
    """Without one that adds the same to all scores, as nothing is rotated."""
    return {name: each for name, each in mutants.items() if name != "bias of k"}


HEAD_NORMS = {
    "norm of queries": without("q_norm"),
    "norm of keys": without("k_norm"),
}
AFTER = {"norm after a block": Mutant(patch=(post_norm, "leave", left_plain))}
BEFORE = {"norm before a block": Mutant(patch=(post_norm, "enter", entered_plain))}
GEMMA = {
    "scale of scores": field(attention_scale=16**-0.5),
    "scale of embeddings": field(embed_scale=1.0),
    "offset of norms": field(norm_offset=0.0),
}
FUSED = {
    "keys before values": in_group(
        "attention", "qkv", lambda w: w._replace(k=w.v, v=w.k)
    ),
    "gate before up": in_group(
        "mlp", "mlp", lambda w: w._replace(gate=w.up, up=w.gate)
    ),
}

CENTERED = {
    "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
}
PLACES = {
    "positions": Mutant(weights=lambda w: w._replace(
        positions=w.positions._replace(weight=0 * w.positions.weight))),
    "first position": Mutant(weights=lambda w: w._replace(
        positions=w.positions._replace(weight=np.roll(w.positions.weight, 1, 0)))),
}  # fmt: skip
HEAD_BIAS = {
    "bias of logits": Mutant(
        weights=lambda w: w._replace(head=w.head._replace(bias=None))
    )
}
UNTURNED_WINDOWS = {
    "window": Mutant(lambda c: replace(
        c, views=tuple(view._replace(window=None) for view in c.views))),
    "window one wider": Mutant(lambda c: replace(
        c, views=tuple(v._replace(window=v.window and v.window + 1) for v in c.views))),
}  # fmt: skip
TURNED = {
    "lanes that hold still": scaling(rotary_dim=0),
    "order of lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
}

COHERE = {
    "scale of logits": field(logit_scale=1.0),
    "order of lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
    "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
}
LATENT = {
    "scale of scores": field(attention_scale=20**-0.5 * 2),
    "lanes that are adjacent": Mutant(lambda c: replace(c, interleaved=False)),
    "norm of the latent": in_group(
        "attention", "latent_norm", lambda w: w._replace(weight=0 * w.weight + 1)
    ),
    "factor on experts": field(routed_scale=7.0),
    "shared expert": Mutant(patch=(moe, "mixture", without_shared)),
}


def in_indexers(name, change):
    """Other tensors in one group of every indexer."""

    def changed(layer):
        indexer = layer.attention.indexer
        if indexer is None:
            return layer
        new = indexer._replace(**{name: change(getattr(indexer, name))})
        return layer._replace(attention=layer.attention._replace(indexer=new))

    return in_layers(changed)


def key_unrotated(ops, c, w, carry, given):
    still = carry._replace(cos=0 * carry.cos + 1, sin=0 * carry.sin)
    return INDEXED(ops, c, w, still, given)


INDEXED, ATTENTION = sparse_mla._indexed, sparse_mla.attention


def with_the_first_token(ops, c, w, carry, *args, **options):
    """The first token in place of those that an earlier layer has chosen."""
    if w.indexer is None:
        carry = carry._replace(ids=carry.ids * 0)
    return ATTENTION(ops, c, w, carry, *args, **options)


CHOSEN = {
    "all tokens": field(index_tokens=40),
    "one token more": field(index_tokens=10),
    "weights of heads": in_indexers(
        "weights", lambda w: w._replace(weight=w.weight**2)
    ),
    "norm of keys": in_indexers(
        "key_norm", lambda w: w._replace(weight=0 * w.weight + 1)
    ),
    "bias of keys": in_indexers("key_norm", lambda w: w._replace(bias=None)),
    "rotation of keys": Mutant(patch=(sparse_mla, "_indexed", key_unrotated)),
    "factor on experts": field(routed_scale=7.0),
    "shared expert": Mutant(patch=(moe, "mixture", without_shared)),
}

DELTA = (
    ROPE
    | NORMS
    | SILU
    | TURNED
    | {
        "gate of attention": Mutant(patch=(qwen3_next, "gated_attention", ungated)),
        "decay of the state": in_recurrent(decay=lambda w: w._replace(rate=w.rate - 9)),
        "shift of the decay": in_recurrent(
            decay=lambda w: w._replace(shift=0 * w.shift)
        ),
        "convolution": in_recurrent(taps=lambda w: w._replace(weight=0 * w.weight + 1)),
        "norm of results": in_recurrent(
            inner=lambda w: w._replace(weight=2 + w.weight)
        ),
        "strength of writes": in_recurrent(
            strength=lambda w: w._replace(weight=0 * w.weight)
        ),
    }
)


def normed_before(ops, c, w, carry, step, state, *, index, sampled_step):
    return blocks.attention(
        ops, c, w, carry, step, state, index=index, view=c.views[index],
        sampled_step=sampled_step,
    )  # fmt: skip


def without_input(_ops, _config, _w, _given, carry):
    return carry


def of_ones(block, group):
    """Ones in place of a norm or of factors, where a layer has them."""

    def changed(layer):
        part = getattr(layer, block) if block else layer
        held = getattr(part, group)
        if held is None:
            return layer
        part = part._replace(**{group: held._replace(weight=0 * held.weight + 1)})
        return layer._replace(**{block: part}) if block else part

    return in_layers(changed)


GEMMA4 = ROPE | NORMS | GELU | BEFORE | AFTER | {
    "window one wider": WINDOWS["window one wider"],
    "theta of windows": field(local_rope=(600.0, RopeScaling())),
    "planes that hold still": scaling(rotary_dim=0),
    "scale of embeddings": field(embed_scale=1.0),
    "norm of queries": of_ones("attention", "q_norm"),
    "norm of keys": of_ones("attention", "k_norm"),
    "factor of a layer": of_ones("", "scale"),
}  # fmt: skip
TURNS = {
    "layers that do not rotate": Mutant(
        lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
    )
}
OUT_BIAS = {
    "bias of the output": in_group("attention", "out", lambda w: w._replace(bias=None))
}
RANKS = {"bias of ranks": Mutant(patch=(moe, "_routed", ranked_plainly))}
SIGMOID = RANKS | {
    "factor on experts": field(routed_scale=7.0),
    "groups": regrouped(chosen=1),
    "shared expert": Mutant(patch=(moe, "mixture", without_shared)),
}
SHARED = {"shared expert": Mutant(patch=(moe, "mixture", without_shared))}
CONVS = {
    "convolution": in_convolutions(taps=lambda w: w._replace(weight=0 * w.weight + 1)),
    "gate before": in_convolutions(before=lambda w: w._replace(weight=0 * w.weight)),
    "gate after": in_convolutions(after=lambda w: w._replace(weight=w.weight[::-1])),
    "norm of queries": in_attention(q_norm=None),
    "norm of keys": in_attention(k_norm=None),
}
MAMBA = {
    "decay of the state": in_mixers(scan=lambda w: w._replace(rate=w.rate - 9)),
    "shift of the decay": in_mixers(
        scan=lambda w: w._replace(shift=0 * w.shift, bias=0 * w.bias)
    ),
    "skipped values": in_mixers(scan=lambda w: w._replace(skip=0 * w.skip)),
    "gate": of_part("gate", "project", lambda w: -w),
    **{
        f"{field} of {name}": of_part(name, field, change)
        for name in ("value", "key", "query")
        for field, change in (("taps", lambda w: w[..., ::-1]),
                              ("shift", lambda w: 0 * w))
    },
}  # fmt: skip
RESULTS = {
    "norm of results": in_mixers(norm=lambda w: w._replace(weight=0 * w.weight + 1)),
    "groups of the norm": Mutant(patch=(mamba2, "_normed", normed_whole)),
}


def as_long_as_it_is(_ops, _w, x, _size):
    return x


FACTORS = {
    "scale of scores": field(attention_scale=None),
    "scale of embeddings": field(embed_scale=1.0),
    "scale of blocks": field(block_scale=1.0),
    "scale of logits": field(logit_scale=1.0),
}
SINKS = {
    "sinks": in_group("attention", "sinks", lambda w: w._replace(logits=w.logits - 1e4))
}


def in_axk1(change):
    """Another norm after the experts."""

    def changed(layer):
        if not isinstance(layer.mlp, axk1.Mixture):
            return layer
        return layer._replace(mlp=layer.mlp._replace(post=change(layer.mlp.post)))

    return in_layers(changed)


def in_order(order, stride, heads, *, start=0):
    return HEAD_ROWS(sorted(order), stride, heads, start=start)


HEAD_ROWS = groups.head_rows


def in_part(part, name, change):
    """Other tensors in one group of a part of every layer."""

    def changed(layer):
        held = getattr(layer, part)
        new = held._replace(**{name: change(getattr(held, name))})
        return layer._replace(**{part: new})

    return in_layers(changed)


def to_zero(w):
    return w._replace(weight=0 * w.weight)


GEMMA3N = (
    ROPE
    | SCALED
    | NORMS
    | {
        "window": seen(lambda window: None),
        "theta of windows": Mutant(
            lambda c: replace(c, local_rope=(c.rope_theta, c.rope_scaling))
        ),
        "cache of another layer": Mutant(
            lambda c: replace(
                c,
                sources=(*range(4), 3, 2),
                views=views([v.window for v in c.views[:4]] + [None, WINDOW]),
            )
        ),
        "cap of logits": field(logit_cap=None),
        "predictions": in_part("updates", "prediction", to_zero),
        "corrections": in_part("updates", "correction", to_zero),
        "factors of outputs": field(scaled=False),
        "residual that is computed on": field(active=0),
        "product beside attention": in_part("product", "right", to_zero),
        "embeddings of layers": in_part("input", "out", to_zero),
        "gates that are left out": field(left_out=(0.3,) * 6),
        "length of residuals": Mutant(patch=(gemma3n, "resized", as_long_as_it_is)),
    }
)

MUTANTS = {
    "arcee": ROPE | NORMS | BIAS | OUT_BIAS | {"activation": field(activation="relu")},
    "seed-oss": ROPE | NORMS | SILU | BIAS | OUT_BIAS,
    "ernie4.5": ROPE | NORMS | SILU | BIAS | OUT_BIAS | {
        "order of lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
    },
    "hunyuan": ROPE | NORMS | SILU | HEAD_NORMS | {
        "norms after the rotation": Mutant(
            patch=(hunyuan_v1_dense, "attention", normed_before)
        ),
    },
    "exaone4": ROPE | SPLIT | NORMS | SILU | HEAD_NORMS | AFTER | TURNS,
    "exaone-moe": ROPE | SPLIT | NORMS | SILU | HEAD_NORMS | TURNS | SIGMOID,
    "gemma": ROPE | NORMS | GELU | {
        "scale of embeddings": field(embed_scale=1.0),
        "offset of norms": field(norm_offset=0.0),
    },
    "ministral3": ROPE | SCALED | NORMS | {
        "growth of queries": field(gain=0.0), "where they grow": field(floor=15),
    },
    "glm4-moe": ROPE | NORMS | SILU | TURNED | HEAD_NORMS | BIAS | SIGMOID,
    "dots1": ROPE | SPLIT | NORMS | SILU | HEAD_NORMS | SIGMOID,
    "stablelm": ROPE | NORMS | SILU | BIAS | TURNED | {
        "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
    },
    "apertus": ROPE | SCALED | NORMS | HEAD_NORMS | BIAS | OUT_BIAS | {
        "squares": in_xielu(positive=lambda w: 0 * w),
        "exponentials": in_xielu(negative=lambda w: 0 * w),
        "slope": in_xielu(slope=lambda w: 0 * w),
    },
    "nemotron": ROPE | NORMS | BIAS | TURNED | {
        "activation": field(activation="relu"),
        "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
        "offset of norms": Mutant(patch=(nemotron, "OFFSET", 0.0)),
    },
    "cwm": ROPE | SCALED | SPLIT | NORMS | SILU,
    "ministral": ROPE | SPLIT | NORMS | SILU,
    "helium": ROPE | NORMS | SILU | BIAS | {
        "adjacent lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
    },
    "glm4-moe-lite": ROPE | LATENT | {
        "groups": regrouped(groups=1, chosen=1),
        "rank of a group": regrouped(best_of=1),
        "shares": field(renormalize=False),
        "bias of ranks": Mutant(patch=(moe, "_routed", ranked_plainly)),
    },
    "hunyuan-moe": ROPE | NORMS | SILU | HEAD_NORMS | SHARED | {
        "norms after the rotation": Mutant(
            patch=(hunyuan_v1_dense, "attention", normed_before)
        ),
        "shares": field(renormalize=False),
    },
    "granite-moe": ROPE | NORMS | SILU | SHARED | {
        "scale of scores": field(attention_scale=None),
        "scale of embeddings": field(embed_scale=1.0),
        "scale of blocks": field(block_scale=1.0),
        "scale of logits": field(logit_scale=1.0),
        "shares": field(renormalize=False),
    },
    "ernie4.5-moe": RANKS | SHARED | ROPE | NORMS | SILU | {
        "order of lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
        "kind of scores": regrouped(kind="sigmoid"),
        "shares": field(renormalize=False),
    },
    "gpt2": NORMS | without_k(BIAS) | OUT_BIAS | {
        "positions": Mutant(weights=lambda w: w._replace(
            positions=w.positions._replace(weight=0 * w.positions.weight))),
        "scale of scores": field(attention_scale=None),
        "activation": field(activation="relu"),
        "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
    },
    "gpt-bigcode": NORMS | without_k(BIAS) | OUT_BIAS | PLACES | CENTERED,
    "gpt-neo": NORMS | OUT_BIAS | UNTURNED_WINDOWS | PLACES | CENTERED | {
        "scale of scores": field(attention_scale=None),
    },
    "gptj": NORMS | TURNED | CENTERED | HEAD_BIAS,
    "codegen": NORMS | CENTERED | HEAD_BIAS | {
        "order of shards": Mutant(patch=(gptj, "SHARDS", 2)),
    },
    "opt": NORMS | without_k(BIAS) | OUT_BIAS | PLACES | CENTERED,
    "falcon": NORMS | ROPE | BIAS | OUT_BIAS | CENTERED,
    "falcon-new": NORMS | ROPE | CENTERED | {
        "activation": field(activation="relu"),
        "blocks in parallel": field(parallel=False),
    },
    "jais2": NORMS | ROPE | BIAS | OUT_BIAS | CENTERED | {
        "activation": field(activation="relu"),
    },
    "vaultgemma": ROPE | SPLIT | NORMS | GELU | GEMMA | BEFORE | {
        "cap of scores": field(attention_cap=None),
        "cap of logits": field(logit_cap=None),
    },
    "solar-open": ROPE | NORMS | SILU | BIAS | SIGMOID,
    "gpt-neox": NORMS | ROPE | BIAS | OUT_BIAS | TURNED | {
        "blocks in parallel": field(parallel=False),
        "activation": field(activation="relu"),
        "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
    },
    "gpt-neox-serial": {"blocks in series": field(parallel=True)},
    "phi": NORMS | ROPE | BIAS | OUT_BIAS | TURNED | {
        "bias of logits": Mutant(
            weights=lambda w: w._replace(head=w.head._replace(bias=None))
        ),
        "activation": field(activation="relu"),
        "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
    },
    "olmo": ROPE | NORMS | SILU | {
        "limit of queries, keys and values": field(limit=None),
        "mean in norms": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
    },
    "olmoe": ROPE | NORMS | SILU | HEAD_NORMS | {"shares": field(renormalize=True)},
    "minimax-m2": ROPE | NORMS | SILU | TURNED | HEAD_NORMS | RANKS | {
        "shares": field(renormalize=False),
    },
    "youtu": ROPE | NORMS | SILU | {
        name: LATENT[name]
        for name in ("scale of scores", "lanes that are adjacent", "norm of the latent")
    },
    "minicpm3": ROPE | NORMS | {
        "scale of embeddings": field(embed_scale=1.0),
        "scale of blocks": field(block_scale=1.0),
        "scale of logits": field(logit_scale=1.0),
        "lanes that are half a head apart": field(interleaved=True),
    },
    "axk1": ROPE | {
        "norm after experts": in_axk1(lambda w: w._replace(weight=0 * w.weight + 1)),
        "groups": regrouped(groups=1, chosen=1),
        "shares": field(renormalize=False),
    },
    "hyperclovax": ROPE | NORMS | SILU | AFTER | FACTORS,
    "granite-swa": NORMS | SILU | SPLIT | FACTORS | SINKS | {
        "base of some layers": field(local=()),
        "layers that do not rotate": Mutant(
            lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
        ),
    },
    "granite-moe-swa": ROPE | NORMS | SILU | SPLIT | FACTORS | SINKS | {
        "shares": field(renormalize=False),
    },
    "flex-olmo": ROPE | NORMS | SILU | HEAD_NORMS | AFTER | {
        "experts of a token": field(experts_per_token=3),
    },
    "hy3": ROPE | NORMS | SILU | HEAD_NORMS | SHARED | RANKS | {
        "shares": field(renormalize=False),
        "factor on experts": field(routed_scale=7.0),
    },
    "flint": ROPE | NORMS | SILU | SPLIT | HEAD_NORMS | SHARED | SINKS | {
        "layers that do not rotate": Mutant(
            lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
        ),
        "shares": field(renormalize=False),
        "kind of scores": regrouped(kind="softmax"),
    },
    "mellum": ROPE | SCALED | SPLIT | NORMS | SILU | HEAD_NORMS | {
        "theta of windows": field(local_rope=None),
        "shares": field(renormalize=False),
    },
    "nanochat": ROPE | NORMS | BIAS | OUT_BIAS | {
        "activation": field(activation="relu"),
        "cap of logits": field(logit_cap=None),
        "direction of the rotation": Mutant(patch=(groups, "head_rows", in_order)),
    },
    "gemma3n": GEMMA3N,
    "gemma4-unified": {"norm after a block": AFTER["norm after a block"]},
    "biogpt": NORMS | without_k(BIAS) | OUT_BIAS | PLACES | CENTERED | {
        "scale of embeddings": field(embed_scale=1.0),
    },
    "persimmon": ROPE | NORMS | OUT_BIAS | TURNED | CENTERED | {
        "norms of heads": in_group("attention", "head_norms", lambda w: None),
        "biases of heads": in_group("attention", "head_norms", lambda w: tuple(
            each._replace(bias=0 * each.bias) for each in w)),
        "activation": field(activation="relu"),
    },
    "afmoe": ROPE | SPLIT | NORMS | SILU | HEAD_NORMS | AFTER | BEFORE | RANKS | {
        "scale of embeddings": field(embed_scale=1.0),
        "factor on experts": field(routed_scale=7.0),
        "gate of attention": in_group(
            "attention", "gate", lambda w: w._replace(weight=0 * w.weight)
        ),
        "layers that do not rotate": Mutant(
            lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
        ),
    },
    "cohere2-moe": ROPE | SPLIT | NORMS | SILU | COHERE | {
        "average with the shared expert": field(average=False),
        "selection": field(selection="sigmoid"),
        "layers that do not rotate": Mutant(
            lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
        ),
    },
    "bamba": MAMBA | RESULTS | NORMS | SILU | ROPE | TURNED,
    "falcon-h1": MAMBA | RESULTS | NORMS | SILU | ROPE | {
        "norm before the gate": field(norm_first=True),
        "scale of scores": field(attention_scale=None),
        **{
            f"factor on the {name} of Mamba-2": Mutant(lambda c, n=name: replace(
                c, factors=c.factors._replace(**{n: 2.0})))
            for name in mamba2.Factors._fields
        },
        **{
            name: field(**{name: 1.0})
            for name in ("mamba_scale", "input_scale", "output_scale", "gate_scale",
                         "down_scale", "embed_scale", "logit_scale")
        },
    },
    "nemotron-h": MAMBA | RESULTS | NORMS | {
        "activation": field(activation="relu"),
        "shares": field(renormalize=False),
        "factor on experts": field(routed_scale=7.0),
        "rank of a group": regrouped(best_of=1),
        "groups": regrouped(chosen=3),
        "bias of ranks": in_experts(bias=lambda w: w._replace(bias=0 * w.bias)),
        "before experts": in_experts(enter=lambda w: w._replace(weight=-w.weight)),
        "after experts": in_experts(leave=lambda w: w._replace(bias=0 * w.bias)),
    },
    "granite-hybrid": MAMBA | RESULTS | NORMS | SILU | SHARED | {
        "layers that do not rotate": field(rotated=True),
        "scale of scores": field(attention_scale=None),
        "scale of embeddings": field(embed_scale=1.0),
        "scale of blocks": field(block_scale=1.0),
        "scale of logits": field(logit_scale=1.0),
    },
    "lfm2": ROPE | NORMS | CONVS | {
        "bias of the convolution": in_convolutions(
            shift=lambda w: w._replace(weight=0 * w.weight)
        ),
    },
    "lfm2-moe": ROPE | NORMS | CONVS | RANKS | {
        "factor on experts": field(routed_scale=7.0),
        "shares": field(renormalize=False),
    },
    "llama3": ROPE | SCALED | NORMS | SILU | HEAD | {
        "scaling factor": scaling(factor=4.0),
        "slowest kept": scaling(low=2.0),
        "fastest slowed": scaling(high=8.0),
        "original context": scaling(original=32),
    },
    "llama-linear": ROPE | SCALED | {"scaling factor": scaling(factor=2.0)},
    "llama-yarn": ROPE | SCALED | {
        "warmth": scaling(gain=1.0),
        "scaling factor": scaling(factor=3.0),
        "fastest slowed": scaling(high=2.0),
        "slowest kept": scaling(low=4.0),
        "original context": scaling(original=256),
    },
    "llama3-published": ROPE | NORMS,
    "mistral-full": ROPE | NORMS,
    "mistral": ROPE | WINDOWS | NORMS | SILU | HEAD,
    "qwen2": ROPE | NORMS | SILU | BIAS,
    "qwen2-window": SPLIT,
    "qwen3": ROPE | NORMS | SILU | HEAD_NORMS,
    "qwen3-window": SPLIT,
    "gemma2": ROPE | SPLIT | NORMS | GELU | GEMMA | BEFORE | AFTER | {
        "cap of scores": field(attention_cap=None),
        "cap of logits": field(logit_cap=None),
    },
    "gemma3": ROPE | SCALED | SPLIT | NORMS | GELU | GEMMA | BEFORE | AFTER
    | HEAD_NORMS | {"theta of windows": field(local_rope=None)},
    "gemma4": GEMMA4,
    "gemma4-small": {
        "cache of another layer": Mutant(lambda c: replace(
            c, sources=(*range(3), 1, 0, 1))),
        "cap of logits": field(logit_cap=None),
        "inputs of layers": Mutant(patch=(gemma4, "add_input", without_input)),
        "their norm": in_layers(lambda layer: layer._replace(input=layer.input._replace(
            post=layer.input.post._replace(weight=0 * layer.input.post.weight + 1)))),
    },
    "gemma4-moe": {
        "factors of experts": of_ones("mixture", "scales"),
        "norm of the router": of_ones("mixture", "router_norm"),
        "norm before experts": of_ones("mixture", "norm"),
        "norm after experts": of_ones("mixture", "post"),
        "norm after the dense layer": of_ones("mixture", "dense_post"),
        "experts of a token": field(experts_per_token=3),
    },
    "phi3": ROPE | WINDOWS | NORMS | SILU | FUSED,
    "phi3-long": ROPE | FUSED | {
        "divisors": scaling(divisors=(1.0, 1.0, 1.0)),
        "long divisors": scaling(divisors=(1.0, 5.0, 9.0)),
        "warmth": scaling(gain=1.0),
        "lanes that hold still": scaling(rotary_dim=0, divisors=(1.0, 1.3, 2.0, 2.0)),
        "order of lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
    },
    "olmo2": ROPE | NORMS | SILU | HEAD_NORMS | AFTER,
    "olmo3": ROPE | SPLIT | SCALED | NORMS | SILU | HEAD_NORMS | AFTER
    | {"theta of windows": field(local_rope=None)},
    "smollm3": ROPE | WINDOWS | NORMS | SILU | BIAS | {
        "layers that do not rotate": Mutant(
            lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
        ),
        "bias of the output": in_group(
            "attention", "out", lambda w: w._replace(bias=None)
        ),
    },
    "granite": ROPE | NORMS | SILU | {
        "scale of scores": field(attention_scale=None),
        "scale of embeddings": field(embed_scale=1.0),
        "scale of blocks": field(block_scale=1.0),
        "scale of logits": field(logit_scale=1.0),
    },
    "gpt-oss": ROPE | SCALED | SPLIT | NORMS | BIAS | {
        "sinks": in_group(
            "attention", "sinks", lambda w: w._replace(logits=w.logits - 1e4)
        ),
        "scaling of part of a plane": scaling(whole_planes=True),
        "limit of the gate": field(gate_limit=7.0),
        "gain of the gate": field(gate_gain=1.702),
        "bias of the router": in_group(
            "mlp", "router", lambda w: w._replace(bias=None)
        ),
        "experts of a token": field(experts_per_token=3),
        **{
            f"bias of experts, {name}": in_group(
                "mlp", f"{name}_bias", lambda w: w._replace(weight=0 * w.weight)
            )
            for name in ("gate", "up", "down")
        },
    },
    "llama-bias-gelu": {
        "activation": field(activation="gelu_sigmoid"),
        **{
            f"bias of {name}": in_group("mlp", "mlp", lambda w, n=name: w._replace(
                **{n: getattr(w, n)._replace(bias=None)}))
            for name in ("gate", "up", "down")
        },
    },
    "cohere": ROPE | NORMS | SILU | BIAS | COHERE,
    "cohere2": ROPE | SPLIT | NORMS | SILU | COHERE | {
        "layers that do not rotate": Mutant(
            lambda c: replace(c, views=tuple(v._replace(rotated=True) for v in c.views))
        ),
    },
    "llama4": ROPE | NORMS | SILU | BIAS | HEAD_NORMS | {
        "chunk": other_views(window=None),
        "size of chunks": other_views(window=12),
        "rotation": other_views(rotated=False),
        "growth of queries": field(gain=0.0),
        "where queries grow": field(floor=8),
        "order of lanes": Mutant(patch=(groups, "rotary_rows", rows_as_stored)),
        "shared expert": in_mixtures(lambda w: w._replace(
            shared=w.shared._replace(down=0 * w.shared.down))),
        "gate before up": in_mixtures(lambda w: w._replace(gate=w.up, up=w.gate)),
        "inputs of experts": Mutant(patch=(llama4, "mixture", scaled_after)),
    },
    "starcoder2": ROPE | WINDOWS | NORMS | BIAS | {
        "activation": field(activation="relu"),
        "approximation of the activation": field(activation="gelu_sigmoid"),
        "bias of norms": in_group("mlp", "norm", lambda w: w._replace(bias=None)),
        "layer norm": Mutant(patch=(layer_norm, "enter", entered_uncentered)),
        **{
            f"bias of {name}": in_group("mlp", "mlp", lambda w, n=name: w._replace(
                **{n: getattr(w, n)._replace(bias=None)}))
            for name in ("up", "down")
        },
    },
    "deepseek2": ROPE | NORMS | LATENT | SILU | {"scores": field(renormalize=True)},
    "deepseek2-groups": LATENT | {
        "norm of queries": in_group(
            "attention", "q_norm", lambda w: w._replace(weight=0 * w.weight + 1)
        ),
        "groups": regrouped(groups=1, chosen=1),
        "best groups": regrouped(chosen=3),
        "rank of a group": regrouped(best_of=2),
    },
    "deepseek3": ROPE | SCALED | LATENT | {
        "warmth": scaling(gain=1.0),
        "groups": regrouped(groups=1, chosen=1),
        "rank of a group": regrouped(best_of=1),
        "kind of scores": regrouped(kind="softmax"),
        "shares": field(renormalize=False),
        "bias of ranks": Mutant(patch=(moe, "_routed", ranked_plainly)),
        "bias of the latent": in_group(
            "attention", "latent", lambda w: w._replace(bias=None)
        ),
    },
    "deepseek3.2": ROPE | SCALED | CHOSEN | {
        "groups": regrouped(groups=1, chosen=1),
        "rank of a group": regrouped(best_of=1),
    },
    "glm5": ROPE | CHOSEN | {
        "tokens of the layer before": Mutant(
            patch=(sparse_mla, "attention", with_the_first_token)
        ),
        "lanes of the indexer": field(index_interleaved=False),
    },
    "qwen3-next": DELTA | SHARED | {"shares": field(renormalize=False)},
    # Computed by the code of Qwen3-Next.
    "qwen3.5": ROPE | TURNED,
    "qwen3.5-moe": SHARED | {"shares": field(renormalize=False)},
    "glm": ROPE | NORMS | SILU | BIAS | FUSED | TURNED,
    "glm4": ROPE | NORMS | SILU | BIAS | BEFORE | AFTER | FUSED | TURNED,
}  # fmt: skip
"""Family: feature: what it is to be without."""
