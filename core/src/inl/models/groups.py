"""Weight groups common to most models, by Hugging Face tensor names."""

from __future__ import annotations

from typing import Any

from inl.spec.weights import Group, Param

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
"""Names of the projection to logits and of the embedding."""


def table(c: Any) -> Group:
    """Return the embedding."""
    return Group("embedding", weight=_table(c))


def head(c: Any) -> Group:
    """Return the projection to logits.

    A tied model shares the embedding unless the checkpoint has another projection.
    """
    table = _table(c)._replace(axis=0)
    own = table._replace(source=HEAD)
    return Group("linear", weight=own._replace(aliases=(table,) if c.tied else ()))


def _table(c: Any) -> Param:
    return Param(TABLE, (c.vocab_size, c.hidden_size))


def norm(
    name: str, size: int, *, offset: float = 0.0, axis: int | None = None
) -> Group:
    """Return a norm of ``size`` elements; ``offset`` is added to the stored weight."""
    weight = Param(f"{name}.weight", (size,), axis=axis, offset=offset)
    return Group("rms_norm", weight=weight)


def qkv(c: Any, at: str, *, bias: bool = False) -> Group:
    """Return query, key and value projections of the layer with name prefix ``at``."""
    params: dict[str, Param] = {}
    for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
        source, rows = f"{at}self_attn.{name}_proj", heads * c.head_dim
        params[name] = Param(f"{source}.weight", (rows, c.hidden_size), axis=0)
        if bias:
            params[f"{name}_bias"] = Param(f"{source}.bias", (rows,), axis=0)
    return Group("qkv_linear", **params)


def out(c: Any, at: str, *, bias: bool = False) -> Group:
    """Return the output projection of attention."""
    source, shape = f"{at}self_attn.o_proj", (c.hidden_size, c.heads * c.head_dim)
    params = {"weight": Param(f"{source}.weight", shape, axis=1)}
    if bias:
        params["bias"] = Param(f"{source}.bias", shape[:1], partial=True)
    return Group("linear", **params)


def gated_mlp(c: Any, at: str) -> Group:
    """Return the gated feed-forward layer."""
    h, inner = c.hidden_size, c.intermediate_size
    return Group(
        "gated_mlp",
        gate=Param(f"{at}mlp.gate_proj.weight", (inner, h), axis=0),
        up=Param(f"{at}mlp.up_proj.weight", (inner, h), axis=0),
        down=Param(f"{at}mlp.down_proj.weight", (h, inner), axis=1),
    )
