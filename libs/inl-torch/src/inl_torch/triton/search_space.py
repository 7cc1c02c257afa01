"""Ways in which the kernels of a decoding step can be cut, to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from inl.errors import RequestError
from inl.spec.kernel import Kernel
from inl.spec.workload import Config
from inl_torch.triton.common import power
from inl_torch.triton.matmul import fused
from inl_torch.triton.matmul.products import left_to_library
from inl_torch.triton.tuning import Attend, Tile, Tuning

KINDS: Mapping[str, tuple[str, ...]] = {
    "norm_qkv": ("norm",),
    "norm_mlp": ("gated", "plain"),
    "norm_logits": ("norm",),
    "attend_project": ("attend", "plain"),
}
"""What each op is made of, in the order in which it is tuned."""

RANGES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "tile": {"rows": (1, 64), "columns": (16, 8192), "warps": (1, 16)},
    "attend": {"keys": (16, 256), "waves": (1, 8), "warps": (1, 16), "stages": (1, 4)},
}
"""Least and most of each number; all but the stages are powers of two."""

ELEMENTS = (32, 64, 16, 128)
"""Weights that a thread holds at once, those that win most often first."""


def axes(
    op: str, specs: tuple[Any, ...], attrs: Mapping[str, Any], tuning: Tuning
) -> Sequence[Sequence[Config]]:
    """Ways to try for a call on specs; none where the kernel refuses it."""
    if op not in KINDS or kernel(op, {}, tuning).refuse(*specs, **attrs):
        return ()
    matrices, rows = _matrices(op, specs)
    found = []
    for kind in KINDS[op]:
        if kind == "attend":
            found.append([_config(kind, cut) for cut in attends(specs[0].shape[2])])
        elif not left_to_library(rows, specs[0].dtype, matrices[kind], tuning):
            k = matrices[kind][1]
            tried = tiles(k) if rows == 1 else few_tiles(k)
            found.append([_config(kind, tile) for tile in tried])
    return [axis for axis in found if axis]


def _matrices(
    op: str, specs: tuple[Any, ...]
) -> tuple[dict[str, tuple[int, int]], int]:
    """Rows and columns of each kind of product, and the rows that it takes."""
    w, rows = specs[-1], specs[0].shape[0]
    if op == "norm_qkv":
        total = sum(part.shape[0] for part in (w.q, w.k, w.v))
        return {"norm": (total, w.q.shape[1])}, rows
    if op == "norm_mlp":
        inner, hidden = w.gate.shape
        return {"gated": (2 * inner, hidden), "plain": w.down.shape}, rows
    if op == "norm_logits":
        return {"norm": w.weight.shape}, specs[2].shape[0]
    return {"plain": w.weight.shape}, rows


def tiles(k: int) -> list[Tile]:
    """Tiles of weights for matrices of ``k`` columns."""
    every = [
        Tile(rows, columns, warps)
        for rows in (1, 2, 4, 8)
        for columns in (256, 512, 1024, 2048)
        for warps in (1, 2, 4, 8)
        if columns < 2 * k
    ]

    def held(tile: Tile) -> int:
        return tile.rows * tile.columns // (32 * tile.warps)

    fits = [tile for tile in every if held(tile) in ELEMENTS]
    return sorted(fits, key=lambda tile: ELEMENTS.index(held(tile)))


def few_tiles(k: int) -> list[Tile]:
    """Tiles of weights for several rows and matrices of ``k`` columns."""
    whole = max(power(k), 64)
    small = [Tile(rows, 128, 2) for rows in (16, 32)]
    return small + [
        Tile(rows, columns, warps)
        for columns in dict.fromkeys((whole, 256))
        for rows in (16, 32)
        for warps in (4, 8)
    ]


def attends(dim: int) -> Iterable[Attend]:
    """Cuts of attention over heads of ``dim`` elements, those for many rows first."""
    most = 128 if dim > 64 else 256
    small = [
        Attend(keys, waves, 1, stages)
        for keys, stages in ((16, 3), (32, 2))
        for waves in (8, 4)
    ]
    return [*small, Attend(64, 8, 4, 2)] + [
        Attend(keys, waves, warps, stages)
        for keys in (64, 128, 32, 256)
        for warps in (4, 2, 8)
        for waves in (2, 1, 4)
        for stages in (2, 3)
        if keys <= most and (stages == 2 or waves == 2)
    ]


def _config(kind: str, cut: Tile | Attend) -> Config:
    return {f"{kind}.{name}": value for name, value in cut._asdict().items()}


def kernel(op: str, config: Config, tuning: Tuning) -> Kernel:
    """The kernel of ``op`` that is cut like this; what is not said stays.

    Raises :class:`~inl.errors.RequestError` for what it has no such numbers of.
    """
    kinds: dict[str, dict[str, int]] = {}
    for name, value in config.items():
        kind, _, number = name.partition(".")
        shape = "attend" if kind == "attend" else "tile"
        least, most = RANGES[shape].get(number, (1, 0))
        odd = number != "stages" and value & (value - 1)
        if kind not in KINDS.get(op, ()) or odd or not least <= value <= most:
            raise RequestError(f"{op}: cannot be cut with {name}={value}")
        kinds.setdefault(kind, {})[number] = value
    for kind, numbers in kinds.items():
        missing = RANGES["attend" if kind == "attend" else "tile"].keys() - numbers
        if missing:
            raise RequestError(f"{op}: {kind} lacks {', '.join(sorted(missing))}")
    attend = kinds.pop("attend", None)
    cut = replace(
        tuning,
        chosen={kind: Tile(**numbers) for kind, numbers in kinds.items()},
        attend=Attend(**attend) if attend else tuning.attend,
    )
    made = next(each for each in fused.kernels(cut) if each.op == op)
    return replace(made, config=dict(config))
