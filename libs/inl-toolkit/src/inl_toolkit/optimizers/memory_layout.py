"""The tiled layout of images and feature maps on TPUs."""

from __future__ import annotations

from typing import Any

from inl.errors import RequestError
from inl_toolkit.functional.arrays import module_of
from inl_toolkit.functional.out_of_memory import translating

TILE = 128
"""Side of the tiles that a TPU multiplies."""


@translating
def to_tiles(x: Any, *, tile: int = TILE, pad: bool = True) -> Any:
    """Rearrange ``x`` [B, H, W, C] to [B, H / tile, W / tile, tile, tile, C].

    Of NumPy, torch or JAX; differentiable where the framework is. pad: fill H and W up
    with zeros to whole tiles. Raises :class:`~inl.errors.RequestError` for other
    shapes, and without ``pad`` for sides that are not multiples.
    """
    shape = tuple(x.shape)
    ragged = any(side % tile for side in shape[1:3]) if tile > 0 else True
    if len(shape) != 4 or 0 in shape or tile < 1 or (ragged and not pad):
        raise RequestError(
            f"to_tiles: found {list(shape)} and tiles of {tile}, accepted: "
            "[batch, height, width, channels]"
            + ("" if pad else " of multiples of the tile, or pad=True")
        )
    xp = module_of("to_tiles", "x", x)
    for axis in (1, 2):
        if missing := -x.shape[axis] % tile:
            edge = xp.zeros_like(x[:, :1] if axis == 1 else x[:, :, :1])
            wide = [*x.shape]
            wide[axis] = missing
            x = xp.concatenate([x, xp.broadcast_to(edge, tuple(wide))], axis=axis)
    batch, height, width, channels = x.shape
    rows, columns = height // tile, width // tile
    split = xp.reshape(x, (batch, rows, tile, columns, tile, channels))
    return xp.swapaxes(split, 2, 3)


@translating
def from_tiles(x: Any, height: int, width: int) -> Any:
    """Undo :func:`to_tiles` for an image of ``height`` and ``width``.

    Raises :class:`~inl.errors.RequestError` for sizes that the tiles do not have.
    """
    shape = tuple(x.shape)
    fits = len(shape) == 6 and all(
        0 < size <= shape[axis] * shape[axis + 2]
        for axis, size in ((1, height), (2, width))
    )
    if not fits:
        raise RequestError(
            f"from_tiles: found {list(shape)} for {height} x {width}, accepted: "
            "[batch, rows, columns, tile, tile, channels] with room for it"
        )
    xp = module_of("from_tiles", "x", x)
    batch, rows, columns, tall, wide, channels = shape
    joined = xp.swapaxes(x, 2, 3)
    whole = xp.reshape(joined, (batch, rows * tall, columns * wide, channels))
    return whole[:, :height, :width]
