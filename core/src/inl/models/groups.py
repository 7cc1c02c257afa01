"""Weight groups common to most models, by Hugging Face tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inl.ops.norm import Norm
from inl.spec.step import Array
from inl.spec.weights import Group, Param, RowSlices

Spans = tuple[tuple[int, int], ...]
"""Row ranges (start, stop)."""
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


def biased_head(c: Any) -> Group:
    """Return the projection to logits with a bias."""
    bias = Param("lm_head.bias", (c.vocab_size,), axis=0)
    return Group("linear", **head(c).params, bias=bias)


def _table(c: Any) -> Param:
    return Param(TABLE, (c.vocab_size, c.hidden_size))


def norm(
    name: str, size: int, *, offset: float = 0.0, axis: int | None = None
) -> Group:
    """Return a norm of ``size`` elements; ``offset`` is added to the stored weight."""
    weight = Param(f"{name}.weight", (size,), axis=axis, offset=offset)
    return Group("rms_norm", weight=weight)


def vector(w: Norm | Group) -> Array:
    """Return the elements of a vector that is loaded as the weight of a norm."""
    assert not isinstance(w, Group), "loading replaces it by tensors"
    return w.weight


def rotated_norm(name: str, c: Any, heads: int = 1) -> Group:
    """Return a norm over heads of queries or keys, in the order of ``rope``."""
    size, lanes = heads * c.head_dim, c.rope_scaling.rotary_dim
    weight = Param(f"{name}.weight", (size,))
    if lanes:
        spans = rotary_rows(c.head_dim, lanes, heads)
        weight = weight._replace(row_slices=RowSlices(spans, size))
    return Group("rms_norm", weight=weight)


def qkv(c: Any, at: str, *, bias: bool = False, interleaved: bool = False) -> Group:
    """Return query, key and value projections of the layer with name prefix ``at``.

    interleaved: whether the lanes of a rotating plane are adjacent in the checkpoint.
    Queries and keys are in the order that ``rope`` expects.
    """
    params: dict[str, Param] = {}
    for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
        source, count = f"{at}self_attn.{name}_proj", heads * c.head_dim
        weight = Param(f"{source}.weight", (count, c.hidden_size), axis=0)
        shift = Param(f"{source}.bias", (count,), axis=0)
        if name != "v" and (interleaved or c.rope_scaling.rotary_dim):
            lanes = c.head_dim, c.rope_scaling.rotary_dim, heads
            order = RowSlices(rotary_rows(*lanes, interleaved=interleaved), count)
            weight = weight._replace(row_slices=order)
            shift = shift._replace(row_slices=order)
        params[name] = weight
        if bias:
            params[f"{name}_bias"] = shift
    return Group("qkv_linear", **params)


def out(c: Any, at: str, *, bias: bool = False) -> Group:
    """Return the output projection of attention."""
    stem, columns = f"{at}self_attn.o_proj", c.heads * c.head_dim
    return linear(stem, c.hidden_size, columns, axis=1, bias=bias)


def linear(
    stem: str, rows: int, columns: int, *, axis: int | None = None, bias: bool = False
) -> Group:
    """Return the linear layer [rows, columns] of a module, sharded along ``axis``.

    The bias of one that is sharded along its columns is added by one rank only.
    """
    params = {"weight": Param(f"{stem}.weight", (rows, columns), axis=axis)}
    if bias:
        row_axis = 0 if axis == 0 else None
        params["bias"] = Param(
            f"{stem}.bias", (rows,), axis=row_axis, partial=axis == 1
        )
    return Group("linear", **params)


def fused_gated(stem: str, h: int, inner: int) -> Group:
    """Return the gated feed-forward layer whose gate and up rows are one tensor."""
    source = f"{stem}.gate_up_proj.weight"
    return Group(
        "gated_mlp",
        gate=rows(source, ((0, inner),), 2 * inner, h),
        up=rows(source, ((inner, 2 * inner),), 2 * inner, h),
        down=Param(f"{stem}.down_proj.weight", (h, inner), axis=1),
    )


def rows(source: str, spans: Spans, total: int, *width: int) -> Param:
    """Return the rows of a stored tensor of ``total`` rows, [rows, *width]."""
    count = sum(stop - start for start, stop in spans)
    return Param(source, (count, *width), axis=0, row_slices=RowSlices(spans, total))


def rotary_rows(
    dim: int, rotary_dim: int, heads: int, *, start: int = 0, interleaved: bool = False
) -> Spans:
    """Return the row ranges of ``heads`` from ``start``, ordered as ``rope`` expects.

    The two lanes of a rotating plane are half a head apart, lanes that do not rotate
    come after those that do. The same order of queries and keys does not change
    attention scores. rotary_dim: lanes that rotate; 0 is all. interleaved: whether the
    lanes of a plane are adjacent in the checkpoint, not half of ``rotary_dim`` apart.
    """
    turned = rotary_dim or dim
    half, still = turned // 2, (dim - turned) // 2
    order = [*range(half), *range(turned, turned + still)]
    order += [*range(half, turned), *range(turned + still, dim)]
    if interleaved:
        order = [*range(0, turned, 2), *range(turned, turned + still)]
        order += [*range(1, turned, 2), *range(turned + still, dim)]
    return head_rows(order, dim, heads, start=start)


def head_rows(
    order: Sequence[int], stride: int, heads: int, *, start: int = 0
) -> Spans:
    """Return the row ranges of the rows ``order`` of heads of ``stride`` rows."""
    lanes = [start + head * stride + lane for head in range(heads) for lane in order]
    breaks = [at for at in range(1, len(lanes)) if lanes[at] != lanes[at - 1] + 1]
    return tuple(
        (lanes[first], lanes[last - 1] + 1)
        for first, last in zip([0, *breaks], [*breaks, len(lanes)], strict=True)
    )


def gated(stem: str, h: int, inner: int) -> Group:
    """Return the gated feed-forward layer of a module, from ``h`` lanes to ``h``."""
    return Group(
        "gated_mlp",
        gate=Param(f"{stem}.gate_proj.weight", (inner, h), axis=0),
        up=Param(f"{stem}.up_proj.weight", (inner, h), axis=0),
        down=Param(f"{stem}.down_proj.weight", (h, inner), axis=1),
    )
