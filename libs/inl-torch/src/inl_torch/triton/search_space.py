"""Search space of kernel configurations for a decoding step, for ``inl tune``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from inl.errors import RequestError
from inl.spec.kernel import Kernel
from inl.spec.workload import Config
from inl_torch.triton.attention import rope_attend
from inl_torch.triton.common import power
from inl_torch.triton.matmul import fused, linear
from inl_torch.triton.matmul.products import library_is_faster
from inl_torch.triton.tuning import AttentionConfig, Tile, Tuning

KINDS: Mapping[str, tuple[str, ...]] = {
    "norm_qkv": ("norm",),
    "norm_mlp": ("gated", "plain"),
    "norm_logits": ("norm",),
    "rope_attend": ("attend",),
    "linear": ("plain",),
}
"""Op -> kinds of kernels that it launches, in the order in which they are tuned."""

RANGES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "tile": {"rows": (1, 64), "columns": (16, 8192), "warps": (1, 16)},
    "attend": {"keys": (16, 256), "waves": (1, 8), "warps": (1, 16), "stages": (1, 4)},
}
"""Smallest and largest value of each parameter; all but ``stages`` are powers of
two."""

ELEMENTS = (32, 64, 16, 128)
"""Weights per thread, from the most to the least often fastest."""


def search_space(
    op: str, specs: tuple[Any, ...], attrs: Mapping[str, Any], tuning: Tuning
) -> Sequence[Sequence[Config]]:
    """Return the configurations to try for a call, one list for each kind of kernel.

    specs, attrs: arguments of the op. Empty where the kernel refuses the call.
    """
    if op not in KINDS or kernel(op, {}, tuning).refuse(*specs, **attrs):
        return ()
    matrices, rows = _matrices(op, specs)
    space = []
    for kind in KINDS[op]:
        if kind == "attend":
            space.append(
                [
                    _as_config(kind, config)
                    for config in attention_configs(specs[0].shape[2])
                ]
            )
        elif not library_is_faster(rows, specs[0].dtype, matrices[kind], tuning):
            k = matrices[kind][1]
            options = tiles(k, tuning.lanes) if rows == 1 else multi_row_tiles(k)
            space.append([_as_config(kind, tile) for tile in options])
    return [axis for axis in space if axis]


def _matrices(
    op: str, specs: tuple[Any, ...]
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the weight shape of each kind of product, and the rows of activations."""
    w, rows = specs[-1], specs[0].shape[0]
    if op == "rope_attend":
        return {}, rows
    if op == "norm_qkv":
        total = sum(part.shape[0] for part in (w.q, w.k, w.v))
        return {"norm": (total, w.q.shape[1])}, rows
    if op == "norm_mlp":
        inner, hidden = w.gate.shape
        return {"gated": (2 * inner, hidden), "plain": w.down.shape}, rows
    if op == "norm_logits":
        return {"norm": w.weight.shape}, specs[2].shape[0]
    return {"plain": w.weight.shape}, rows


def tiles(k: int, lanes: int = 32) -> list[Tile]:
    """Tiles for one row of activations and matrices of ``k`` columns."""
    candidates = [
        Tile(rows, columns, warps)
        for rows in (1, 2, 4, 8)
        for columns in (256, 512, 1024, 2048)
        for warps in (1, 2, 4, 8)
        if columns < 2 * k
    ]

    def elements_per_thread(tile: Tile) -> int:
        return tile.rows * tile.columns // (lanes * tile.warps)

    supported = [tile for tile in candidates if elements_per_thread(tile) in ELEMENTS]
    return sorted(supported, key=lambda tile: ELEMENTS.index(elements_per_thread(tile)))


def multi_row_tiles(k: int) -> list[Tile]:
    """Tiles for several rows of activations and matrices of ``k`` columns."""
    whole = max(power(k), 64)
    small = [Tile(rows, 128, 2) for rows in (16, 32)]
    return small + [
        Tile(rows, columns, warps)
        for columns in dict.fromkeys((whole, 256))
        for rows in (16, 32)
        for warps in (4, 8)
    ]


def attention_configs(dim: int) -> Iterable[AttentionConfig]:
    """Attention configurations for heads of ``dim`` elements, for many rows first."""
    most = 128 if dim > 64 else 256
    small = [
        AttentionConfig(keys, waves, 1, stages)
        for keys, stages in ((16, 3), (32, 2))
        for waves in (8, 4)
    ]
    return [*small, AttentionConfig(64, 8, 4, 2)] + [
        AttentionConfig(keys, waves, warps, stages)
        for keys in (64, 128, 32, 256)
        for warps in (4, 2, 8)
        for waves in (2, 1, 4)
        for stages in (2, 3)
        if keys <= most and (stages == 2 or waves == 2)
    ]


def _as_config(kind: str, config: Tile | AttentionConfig) -> Config:
    return {f"{kind}.{name}": value for name, value in config._asdict().items()}


def kernel(op: str, config: Config, tuning: Tuning) -> Kernel:
    """Return the kernel of ``op`` with ``config``, and ``tuning`` for the other kinds.

    Raises :class:`~inl.errors.RequestError` for unknown or missing parameters.
    """
    kinds: dict[str, dict[str, int]] = {}
    for name, value in config.items():
        kind, _, number = name.partition(".")
        shape = "attend" if kind == "attend" else "tile"
        least, most = RANGES[shape].get(number, (1, 0))
        invalid = number != "stages" and value & (value - 1)
        if kind not in KINDS.get(op, ()) or invalid or not least <= value <= most:
            raise RequestError(f"{op}: {name}={value} is no valid parameter")
        kinds.setdefault(kind, {})[number] = value
    for kind, numbers in kinds.items():
        missing = RANGES["attend" if kind == "attend" else "tile"].keys() - numbers
        if missing:
            raise RequestError(f"{op}: {kind} lacks {', '.join(sorted(missing))}")
    attend = kinds.pop("attend", None)
    tuned = replace(
        tuning,
        overrides={kind: Tile(**numbers) for kind, numbers in kinds.items()},
        attend=AttentionConfig(**attend) if attend else tuning.attend,
    )
    families = (fused.kernels, linear.kernels, rope_attend.kernels)
    candidates = chain.from_iterable(kernels(tuned) for kernels in families)
    found = next(one for one in candidates if (one.op, one.name) == (op, "triton"))
    return replace(found, config=dict(config))
