"""Matrices in the layout of compressed-tensors, which vLLM and transformers read too.

``fp8``: E4M3 with a scale for each row. ``int8`` and ``int4``: codes in words, with a
scale for 32 columns, which INL repacks as ``q8_0`` and ``q4_0``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.blocks.decode_32 import E4M3
from inl.checkpoints.blocks.encode import e4m3_codes
from inl.checkpoints.blocks.encode_gguf import symmetric_scale
from inl.dtypes import E4M3_LARGEST, HostArray, cast, widen, wrap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Specs = dict[str, tuple[str, tuple[int, ...]]]

GROUP: Final = 32
BITS: Final = {"int8": 8, "int4": 4}
KINDS: Final = ("fp8", *BITS)


def fits(shape: tuple[int, ...], kind: str) -> bool:
    """Whether a matrix can be stored as ``kind``."""
    return len(shape) == 2 and (kind == "fp8" or shape[1] % GROUP == 0)


def config(kind: str, ignored: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config``; ``ignored`` are modules that stay floats."""
    weights: dict[str, Any] = {
        "num_bits": BITS.get(kind, 8),
        "type": "int" if kind in BITS else "float",
        "symmetric": True,
        "strategy": "group" if kind in BITS else "channel",
        "group_size": GROUP if kind in BITS else None,
        "dynamic": False,
    }
    form = "pack-quantized" if kind in BITS else "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None,
             "output_activations": None, "format": form}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(set(ignored)),
        "kv_cache_scheme": None,
    }


def specs(module: str, shape: tuple[int, ...], kind: str, scale: str) -> Specs:
    """Return dtype and shape of each stored tensor of a matrix [N, K]."""
    rows, columns = shape
    if kind == "fp8":
        return {
            f"{module}.weight": ("float8_e4m3", shape),
            f"{module}.weight_scale": (scale, (rows, 1)),
        }
    return {
        f"{module}.weight_packed": ("int32", (rows, columns * BITS[kind] // 32)),
        f"{module}.weight_scale": (scale, (rows, columns // GROUP)),
        f"{module}.weight_shape": ("int64", (2,)),
    }


def quantize(
    values: NDArray[np.float32], kind: str, scale: str
) -> tuple[HostArray, HostArray, NDArray[np.float32]]:
    """Return the codes and scales of some rows [n, K], and what they decode to."""
    if kind == "fp8":
        largest = np.abs(values).max(1, keepdims=True)
        stored = _stored(largest / np.float32(E4M3_LARGEST), scale)
        step = widen(stored).astype(np.float32)
        # A scale that was rounded down would lift the largest element above 448.
        limited = np.clip(values * _inverse(step), -E4M3_LARGEST, E4M3_LARGEST)
        codes = e4m3_codes(np.asarray(limited, np.float32))
        decoded = E4M3[codes] * step
        return HostArray(codes, "float8_e4m3", codes.shape), stored, decoded
    bits = BITS[kind]
    half = 1 << bits - 1
    groups = values.reshape(len(values), -1, GROUP)
    if bits == 8:
        found = np.abs(groups).max(-1, keepdims=True) / np.float32(half - 1)
    else:
        flat = groups.reshape(-1, GROUP)
        with np.errstate(all="ignore"):
            found = symmetric_scale(flat, np.ones_like(flat), half, positive=True)
    stored = _stored(found.reshape(groups.shape[:2]), scale)
    step = widen(stored).astype(np.float32)[:, :, None]
    codes = np.clip(np.rint(groups * _inverse(step)), -half, half - 1)
    decoded = (codes * step).reshape(values.shape)
    return wrap(_words(codes.astype(np.int64) + half, bits)), stored, decoded


def shape_tensor(shape: tuple[int, ...]) -> HostArray:
    """Return ``weight_shape`` of a matrix."""
    return wrap(np.array(shape, np.int64))


def _words(codes: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Pack codes [n, groups, 32] along columns, the lowest bits first."""
    per_word = 32 // bits
    split = codes.reshape(len(codes), -1, per_word).astype(np.uint32)
    places = np.arange(0, 32, bits, dtype=np.uint32)
    words: NDArray[np.int32] = np.bitwise_or.reduce(split << places, -1).view(np.int32)
    return words


def _stored(scales: NDArray[np.float32], dtype: str) -> HostArray:
    return cast(np.ascontiguousarray(scales), dtype)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), 1 / scale).astype(np.float32)
