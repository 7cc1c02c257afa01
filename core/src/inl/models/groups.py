"""Weight groups that most models have, under their Hugging Face names."""

from __future__ import annotations

from typing import Any

from inl.spec.weights import Group, Param


def table(c: Any) -> Group:
    """The embedding."""
    return Group("embedding", weight=_table(c))


def head(c: Any) -> Group:
    """The projection to logits, the embedding itself where they are tied."""
    weight = _table(c) if c.tied else _table(c)._replace(source="lm_head.weight")
    return Group("linear", weight=weight._replace(axis=0))


def _table(c: Any) -> Param:
    return Param("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))


def norm(
    name: str, size: int, *, offset: float = 0.0, axis: int | None = None
) -> Group:
    """A norm of ``size`` lanes, its weights stored ``offset`` too small."""
    weight = Param(f"{name}.weight", (size,), axis=axis, offset=offset)
    return Group("rms_norm", weight=weight)


def qkv(c: Any, at: str, *, bias: bool = False) -> Group:
    """Queries, keys and values of the layer whose names begin with ``at``."""
    found: dict[str, Param] = {}
    for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
        source, rows = f"{at}self_attn.{name}_proj", heads * c.head_dim
        found[name] = Param(f"{source}.weight", (rows, c.hidden_size), axis=0)
        if bias:
            found[f"{name}_bias"] = Param(f"{source}.bias", (rows,), axis=0)
    return Group("qkv_linear", **found)


def out(c: Any, at: str) -> Group:
    """What attention gives back to the residual."""
    shape = c.hidden_size, c.heads * c.head_dim
    return Group("linear", weight=Param(f"{at}self_attn.o_proj.weight", shape, axis=1))


def gated_mlp(c: Any, at: str) -> Group:
    """The feed-forward of a layer."""
    h, inner = c.hidden_size, c.intermediate_size
    return Group(
        "gated_mlp",
        gate=Param(f"{at}mlp.gate_proj.weight", (inner, h), axis=0),
        up=Param(f"{at}mlp.up_proj.weight", (inner, h), axis=0),
        down=Param(f"{at}mlp.down_proj.weight", (h, inner), axis=1),
    )
