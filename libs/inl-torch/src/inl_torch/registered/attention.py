"""Attention by torch's ``scaled_dot_product_attention``, differentiable at every order.

Its fused kernels have one derivative only, and none under torch's transforms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn import functional

from inl.spec.attention_pattern import HIDDEN, AttentionPattern
from inl.spec.explained import RECORDS, refuse, report
from inl_torch.registered.register import is_transformed

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mask = torch.Tensor | None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: AttentionPattern,
    *,
    mask: Mask = None,
    scale: float,
    inputs: str = "",
    precision: str | None = None,  # noqa: ARG001 - torch has a setting of its own
) -> torch.Tensor:
    """Attention of queries [..., L, d], without an array of all scores.

    mask: as of :func:`inl.kernels.flash_attention`. inputs: dtype of the operands of a
    GPU's fused kernels, whose sums and softmax are float32; others widen half types.
    """
    dtype, on_gpu = q.dtype, q.device.type == "cuda"
    fused = getattr(torch, inputs) if inputs and on_gpu else None
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (each.to(fused or wide) for each in (q, k, v))
    return _attend(q, k, v, pattern, mask, scale).to(dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: AttentionPattern,
    mask: Mask,
    scale: float,
) -> torch.Tensor:
    if RECORDS:
        _report(q, pattern, mask)
    if pattern.window is not None or pattern.blocks is not None:
        return _by_tiles(q, k, v, pattern, mask, scale)
    queries, keys = pattern.length, pattern.keys
    if mask is None and (not pattern.causal or queries in (1, keys)):
        return _attention(q, k, v, None, pattern.causal and queries > 1, scale)
    at = torch.arange(max(queries, keys), device=q.device)
    seen = pattern.seen(at[:queries, None], at[:keys])
    return _masked(q, k, v, seen, mask, scale)


def _report(q: torch.Tensor, pattern: AttentionPattern, mask: Mask) -> None:
    """Report the way of :func:`_attend`; torch selects a kernel of its own below it."""
    precision = f"{str(q.dtype).removeprefix('torch.')} operands, softmax in float32"
    whole = "attention/torch scaled_dot_product_attention"
    if pattern.window is not None or pattern.blocks is not None:
        kind = "window" if pattern.window is not None else "block_mask"
        refuse(whole, f"would compute every score; {kind} leaves tiles out")
        report(f"{whole} of gathered tiles of {pattern.size}", precision)
    elif mask is not None or (
        pattern.causal and pattern.length not in (1, pattern.keys)
    ):
        report(f"{whole} with a mask", precision)
    else:
        report(whole, precision)


class Group(NamedTuple):
    """Rows of tiles with similar numbers of tiles that are computed."""

    rows: NDArray[Any]
    """[rows]."""
    columns: NDArray[Any]
    """[rows, tiles]: tiles of keys."""
    wanted: NDArray[Any]
    """[rows, tiles]: whether a tile is computed, or fills up."""


def _groups(pattern: AttentionPattern) -> list[Group]:
    wanted = pattern.tiles().wanted
    counts = wanted.sum(1)
    doubled = 2 ** np.ceil(np.log2(np.maximum(counts, 1)))
    shares = np.where(counts > 0, np.minimum(doubled, pattern.columns), 0).astype(int)
    groups = []
    for count in np.unique(shares):
        rows = np.flatnonzero(shares == count)
        columns = np.argsort(~wanted[rows], axis=1, kind="stable")[:, :count]
        held = np.take_along_axis(wanted[rows], columns, 1)
        groups.append(Group(rows, columns, held))
    return groups


# torch's compiler would trace the arithmetic on the host.
_groups._torchdynamo_disable = True  # type: ignore[attr-defined]


def _by_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: AttentionPattern,
    mask: Mask,
    scale: float,
) -> torch.Tensor:
    """Gather the keys that each tile of queries sees.

    Tiles with similar numbers of them are computed together: at most twice the work,
    and as many calls as the largest number has binary digits.
    """
    size = pattern.size
    k, v = (each.expand(*q.shape[:-2], *each.shape[-2:]) for each in (k, v))
    queries = _tiles(q, -2, size)
    keys, values = _tiles(k, -2, size), _tiles(v, -2, size)
    results, order = [], []
    for group in _groups(pattern):
        rows, held = _on(group.rows, q), _on(group.wanted, q)
        order.append(group.rows)
        x = queries.index_select(-3, rows)
        if not held.shape[1]:
            results.append(x[..., :1] * 0 * v[..., :1, :].unsqueeze(-3))
            continue
        columns, at = _on(group.columns, q), torch.arange(size, device=q.device)
        key = (columns[:, :, None] * size + at).flatten(1)
        seen = (key < pattern.keys) & held.repeat_interleave(size, 1)
        query = rows[:, None] * size + at
        near = pattern.seen(query[:, :, None], key[:, None])
        seen = seen[:, None] if near is None else seen[:, None] & near
        near_keys, near_values = (_selected(each, columns) for each in (keys, values))
        tile = None if mask is None else _gathered(mask, rows, columns, size)
        results.append(_masked(x, near_keys, near_values, seen, tile, scale))
    back = np.argsort(np.concatenate(order), kind="stable")
    y = torch.cat(results, -3).index_select(-3, _on(back, q)).flatten(-3, -2)
    return y[..., : pattern.length, :]


def _gathered(
    mask: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, size: int
) -> torch.Tensor:
    """Return a mask [..., L, S] for rows of tiles: [..., rows, size, count * size]."""
    if mask.ndim > 1 and mask.shape[-2] != 1:
        mask = _tiles(mask, -2, size).index_select(-3, rows)
    else:
        mask = mask.reshape(*mask.shape[:-2], 1, 1, mask.shape[-1])
    if mask.shape[-1] == 1:
        return mask
    tiles = _tiles(mask, -1, size)
    tiles = tiles.expand(*tiles.shape[:-4], len(rows), *tiles.shape[-3:])
    at = columns.reshape(*[1] * (tiles.ndim - 4), len(rows), 1, -1, 1)
    return tiles.take_along_dim(at, -2).flatten(-2)


def _tiles(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Split an axis into tiles, the last one filled with zeros."""
    missing = -x.shape[axis] % size
    padded = functional.pad(x, (0, 0) * (-axis - 1) + (0, missing))
    at = padded.ndim + axis
    return padded.reshape(*padded.shape[:at], -1, size, *padded.shape[at + 1 :])


def _selected(tiles: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return tiles [rows, count] of [..., tiles, size, d], joined for each row."""
    chosen = tiles.index_select(-3, columns.flatten())
    lead, width = tiles.shape[:-3], tiles.shape[-1]
    return chosen.reshape(*lead, len(columns), -1, width)


def _on(value: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(value).to(like.device)


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Mask,
    mask: Mask,
    scale: float,
) -> torch.Tensor:
    """Attention to the keys that are ``seen`` and not hidden by ``mask``."""
    if mask is None or mask.dtype == torch.bool:
        both = [each for each in (seen, mask) if each is not None]
        visible = both[0] if len(both) == 1 else both[0] & both[1]
        some = visible.any(-1, keepdim=True)
        # A row of hidden keys only would be NaN, also in derivatives.
        y = _attention(q, k, v, visible | ~some, False, scale)
    else:
        shown = mask > HIDDEN / 2
        visible = shown if seen is None else shown & seen
        some = visible.any(-1, keepdim=True)
        bias = torch.where(visible, mask.to(q.dtype), -torch.inf)
        y = _attention(q, k, v, bias.masked_fill(~some, 0), False, scale)
    return torch.where(some, y, 0)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    given = [each for each in (q, k, v, mask) if each is not None]
    if torch.compiler.is_compiling():
        return _fused(q, k, v, mask, causal, scale)
    # No public name says whether a forward derivative is being computed.
    if forward_ad._current_level >= 0 or is_transformed(*given):
        return _formula(q, k, v, mask, causal, scale)
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        result: torch.Tensor = _Attention.apply(q, k, v, mask, causal, scale)  # type: ignore[no-untyped-call]
        return result
    return _fused(q, k, v, mask, causal, scale)


class _Attention(torch.autograd.Function):
    """The fused kernel, computed again for its derivative."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float
    ) -> Any:
        ctx.save_for_backward(q, k, v, mask)
        ctx.attrs = causal, scale
        return _fused(q, k, v, mask, causal, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operands = list(ctx.saved_tensors)
        again = torch.is_grad_enabled()  # the derivative is differentiated as well
        if not again:
            operands = [x if x is None else x.detach() for x in operands]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        with torch.enable_grad():
            for i in wanted:
                if not again:
                    operands[i].requires_grad_()
            compute: Any = _formula if again else _fused
            y = compute(*operands, *ctx.attrs)
            found = torch.autograd.grad(
                y, [operands[i] for i in wanted], gradients[0].to(y.dtype),
                create_graph=again,
            )  # fmt: skip
        parts: list[Any] = [None] * 6
        for i, part in zip(wanted, found, strict=True):
            parts[i] = part
        return tuple(parts)


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Fused kernels take four axes, those of half types on a GPU grouped heads."""
    lead = q.shape[:-2]
    is_grouped = k.shape[:-2] != lead
    is_native = mask is None and q.dtype.itemsize == 2 and q.device.type == "cuda"
    if is_grouped and not is_native:
        k, v = (each.expand(*lead, *each.shape[-2:]) for each in (k, v))
    if mask is not None and mask.ndim == 1:
        mask = mask[None]
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(*lead, *mask.shape[-2:])
    if mask is not None and mask.ndim > 2:
        mask = _folded(mask)
    x, y, z = map(_folded, (q, k, v))
    result = functional.scaled_dot_product_attention(
        x, y, z, mask, is_causal=causal, scale=scale,
        enable_gqa=is_grouped and is_native,
    )  # fmt: skip
    return result.reshape(*lead, *result.shape[-2:])


def _folded(x: torch.Tensor) -> torch.Tensor:
    """Return [..., A, L, d] as four axes."""
    missing = max(4 - x.ndim, 0)
    return x[(None,) * missing] if x.ndim < 5 else x.flatten(0, -4)


def _formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    scores = q @ k.mT * scale
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        mask = ones.tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v
