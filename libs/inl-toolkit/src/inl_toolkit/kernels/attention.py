"""Attention by tiles with a running softmax (Dao et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import KernelError
from inl.spec.attention_pattern import HIDDEN, AttentionPattern
from inl.spec.explained import RECORDS, refuse, report
from inl_toolkit.functional.arrays import ArrayModule, cast, dtype_name, like, module_of
from inl_toolkit.functional.dynamics import functions_of
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.kernels.config import configured
from inl_toolkit.kernels.dense import half_type, widened
from inl_toolkit.kernels.operands import check_arrays, check_number
from inl_toolkit.kernels.precision import rounded
from inl_toolkit.kernels.profile import recorded

if TYPE_CHECKING:
    from numpy.typing import NDArray

TILE = 128
"""Default tile."""


@translating
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    window: int | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    block_size: int | None = None,
    use_flash: bool | None = None,
) -> Any:
    """Attention of ``query`` [..., L, d] to ``key`` [..., S, d].

    value: [..., S, e]. Returns [..., L, e]; a query that sees no key gives zeros. Of
    grouped queries [..., H, L, d], keys and values have G heads, and H is a multiple of
    G: head h sees keys h // (H / G).

    mask: broadcasts to [..., L, S]; boolean, true where a key is seen, or added to the
    scores. causal: a query sees keys up to its position, the last query at the last
    key. window: keys less than this far away. block_mask: boolean [tiles of L, tiles of
    S]; tiles that are not set take no time. scale: 1 / sqrt(d) by default. use_flash:
    without memory for all scores, by tiles of ``block_size``, or by torch's
    ``scaled_dot_product_attention``, in a program whose size does not depend on L and
    S; otherwise all scores at once. Raises :class:`~inl.errors.KernelError` for shapes
    that do not match.
    """
    framework = _check(query, key, value, window)
    mask = _usable_mask(mask, query, key)
    config = configured(block_size=block_size, use_efficient_attention=use_flash)
    length, keys = query.shape[-2], key.shape[-2]
    tiled = config.use_efficient_attention or block_mask is not None
    size = (config.block_size or TILE) if tiled else max(length, keys)
    pattern = AttentionPattern(length, keys, size, causal, window)
    if block_mask is not None:
        pattern = pattern._replace(blocks=_blocks(block_mask, pattern))
    if scale is not None:
        check_number("flash_attention", "scale", scale)
    else:
        scale = 1 / math.sqrt(query.shape[-1])
    own, dtype = functions_of(framework), query.dtype
    xp = module_of("flash_attention", "query", query)
    precise = config.precision in ("high", "highest")

    def run() -> Any:
        q, k, v, seen = _grouped(xp, query, key, value, mask)
        inputs = half_type(q, k, v)
        if config.rounding in ("bfloat16", "float16") or not inputs:
            q, k, v = (widened(each) for each in (q, k, v))
        if config.rounding in ("bfloat16", "float16"):
            inputs = config.rounding
            q, k, v = (rounded(each, inputs) for each in (q, k, v))
        shape = (*query.shape[:-1], value.shape[-1])
        if own.attention is not None and tiled:
            precision = config.precision if precise else None
            y = own.attention(
                q, k, v, pattern, mask=seen, scale=scale, inputs=inputs,
                precision=precision,
            )  # fmt: skip
            return cast(xp.reshape(y, shape), dtype)
        q, k, v = (widened(each) for each in (q, k, v))
        if RECORDS:
            if own.attention is not None:
                refuse(f"attention of {framework}", "use_flash is off")
            how = f"tiles of {size}" if tiled else "all scores at once"
            rounding = f", rounded to {inputs}" if config.rounding else ""
            kind = f"{dtype_name(q)} operands{rounding}"
            report(f"attention/{framework} formula", f"{kind}; {how}")
        q = q * scale
        wanted = pattern.tiles().wanted
        rows = [
            _row(xp, q, k, v, seen, part, pattern, keep)
            for part, keep in zip(_parts(length, size), wanted, strict=True)
        ]
        y = rows[0] if len(rows) == 1 else xp.concatenate(rows, axis=-2)
        return cast(xp.reshape(y, shape), dtype)

    return recorded(f"attention/{'tiled' if tiled else 'plain'}", query, run)


def _row(
    xp: ArrayModule,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    part: slice,
    pattern: AttentionPattern,
    keep: NDArray[np.bool_],
) -> Any:
    """Attention of one tile of queries, already scaled."""
    q, top = q[..., part, :], None
    for keys, wanted in zip(_parts(k.shape[-2], pattern.size), keep, strict=True):
        if not wanted:
            continue
        at = [np.arange(each.start, each.stop) for each in (part, keys)]
        seen = pattern.seen(at[0][:, None], at[1])
        scores = xp.matmul(q, xp.swapaxes(k[..., keys, :], -1, -2))
        scores = _masked(xp, scores, seen, mask, part, keys)
        largest = xp.max(scores, axis=-1, keepdims=True)
        new = largest if top is None else xp.where(largest > top, largest, top)
        # A row of hidden keys only would otherwise count each of them as 1.
        weights = xp.exp(scores - new) * (scores > HIDDEN / 2)
        sums = xp.sum(weights, axis=-1, keepdims=True)
        product = xp.matmul(weights, v[..., keys, :])
        if top is None:
            total, y = sums, product
        else:
            shrink = xp.exp(top - new)
            total, y = total * shrink + sums, y * shrink + product
        top = new
    if top is None:
        row = xp.matmul(q, xp.swapaxes(k[..., :1, :], -1, -2))
        return xp.matmul(row * 0, v[..., :1, :])
    return y / xp.where(total > 0, total, xp.ones_like(total))


def _masked(
    xp: ArrayModule, scores: Any, seen: Any, mask: Any, part: slice, keys: slice
) -> Any:
    hidden = xp.ones_like(scores) * HIDDEN
    if seen is not None and not seen.all():
        scores = xp.where(like(seen, scores), scores, hidden)
    if mask is None:
        return scores
    tile = mask
    if mask.shape[-1] != 1:
        tile = tile[..., keys]
    if len(mask.shape) > 1 and mask.shape[-2] != 1:
        tile = tile[..., part, :]
    if "bool" in str(mask.dtype):
        return xp.where(tile, scores, hidden)
    total = scores + tile
    return xp.where(total > HIDDEN / 2, total, hidden)


def _parts(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _grouped(
    xp: ArrayModule, query: Any, key: Any, value: Any, mask: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the operands; heads of grouped queries are [..., G, H / G]."""
    if query.shape[:-2] == key.shape[:-2]:
        return query, key, value, mask
    heads, groups = query.shape[-3], key.shape[-3]

    def split(x: Any, size: int) -> Any:
        parts = (groups, heads // groups) if size == heads else (size, 1)
        return xp.reshape(x, (*x.shape[:-3], *parts, *x.shape[-2:]))

    if mask is not None and len(mask.shape) > 2:
        mask = split(mask, mask.shape[-3])
    x, y = (
        xp.reshape(each, (*each.shape[:-2], 1, *each.shape[-2:]))
        for each in (key, value)
    )
    return split(query, heads), x, y, mask


def _blocks(given: Any, pattern: AttentionPattern) -> NDArray[np.bool_]:
    blocks, tiles = np.asarray(given, bool), (pattern.rows, pattern.columns)
    if blocks.shape != tiles:
        raise KernelError(
            f"flash_attention: block_mask: found {list(blocks.shape)}, accepted: "
            f"{list(tiles)}, the tiles of queries and keys"
        )
    return blocks


def _usable_mask(mask: Any, query: Any, key: Any) -> Any:
    """Return the mask in the framework of ``query``."""
    if mask is None:
        return None
    if isinstance(mask, (np.ndarray, list)) and not isinstance(query, np.ndarray):
        mask = like(np.asarray(mask), query)
    check_arrays("flash_attention", query=query, mask=mask)
    scores = (*query.shape[:-1], key.shape[-2])
    given = tuple(mask.shape)
    pairs = zip(reversed(given), reversed(scores), strict=False)
    kind = dtype_name(mask)
    fits = 0 < len(given) <= len(scores) and all(a in (1, b) for a, b in pairs)
    if not fits or not ("bool" in kind or "float" in kind):
        raise KernelError(
            f"flash_attention: mask: found {kind} {list(given)}, accepted: booleans or "
            f"floating-point numbers that broadcast to {list(scores)}"
        )
    return mask


def _check(query: Any, key: Any, value: Any, window: int | None) -> str:
    """Return the framework of the arrays."""
    framework = check_arrays(
        "flash_attention", floating=True, query=query, key=key, value=value
    )
    shapes = [tuple(each.shape) for each in (query, key, value)]
    q, k, v = shapes
    fits = min(map(len, shapes)) >= 2 and q[-1] == k[-1] and k[-2] == v[-2]
    is_grouped = min(map(len, shapes)) > 2 and q[:-3] == k[:-3] and k[-3] > 0
    alike = q[:-2] == k[:-2] or (is_grouped and q[-3] % k[-3] == 0)
    if not fits or k[:-2] != v[:-2] or not alike or 0 in q or 0 in k:
        raise KernelError(
            f"flash_attention: found {', '.join(str(list(s)) for s in shapes)}, "
            "accepted: [..., L, d], [..., S, d], [..., S, e]; heads of queries may be "
            "a multiple of those of keys and values"
        )
    if window is not None and (type(window) is not int or window < 1):
        raise KernelError(
            f"flash_attention: window: found {window!r}, accepted: 1 or more"
        )
    return framework
