"""RoPE scaling of GGUF files, which store it as tensors of frequency divisors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.files.tensor_file import Entry, TensorFile
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROPE_FACTORS: Final = "rope_freqs.weight"

LONG_FACTORS: Final = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""Tensors of LongRoPE divisors in files of Phi-3, by config field."""

LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
"""Frequency factors and context of Llama 3.1 to 3.3; only the largest divisor differs
between their files.
"""


STILL: Final = 1e6
"""Least divisor of planes that do not rotate."""


def partial_rope_config(
    file: TensorFile, entry: Entry, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``rope_parameters`` of Gemma 4, whose first planes rotate.

    The divisors of ``entry`` are 1 for them. Raises :class:`CheckpointError` for
    others, except those of at least :data:`STILL` after them.
    """
    factors = file.array(entry).data.astype(np.float64)
    turning = int((factors == 1).sum())
    half = config["global_head_dim"] // 2
    plain = factors[:turning] == 1, factors[turning:] >= STILL
    if entry.shape != (half,) or not all(part.all() for part in plain):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: found {entry.dtype} "
            f"{list(entry.shape)}, divisors up to {factors.max():g}; accepted: "
            f"[{half}], of 1, then of at least {STILL:g}"
        )
    rope = config["rope_parameters"]
    full = {**rope["full_attention"], "partial_rotary_factor": turning / half}
    return {"rope_parameters": {**rope, "full_attention": full}}


def rope_config(
    file: TensorFile, entry: Entry, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``rope_scaling`` field equivalent to the divisors of ``entry``.

    Raises :class:`CheckpointError` if they do not follow the rule of Llama 3.
    """
    half = config.get("head_dim", 0) // 2
    if entry.dtype != "float32" or entry.shape != (half,) or half == 0:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: found {entry.dtype} "
            f"{list(entry.shape)}; accepted: float32 [{half}], half of head_dim"
        )
    factors = file.array(entry).data.astype(np.float64)
    factor = float(factors.max())
    expected = llama3_factors(factor, half, config["rope_theta"])
    if not np.allclose(factors, expected, rtol=1e-3, atol=0.0):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: found divisors up to {factor:g} "
            "of another rule; accepted: those of Llama 3.1 to 3.3"
        )
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL,
        }
    }


def long_rope_config(
    file: TensorFile, entries: Mapping[str, Entry], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``rope_scaling`` field of LongRoPE; ``entries`` by field name."""
    half = int(config["head_dim"] * config["partial_rotary_factor"] + 0.5) // 2
    factors: dict[str, list[float]] = {}
    for field, entry in entries.items():
        if entry.dtype != "float32" or entry.shape != (half,):
            raise CheckpointError(
                f"{file.path}: tensor {LONG_FACTORS[field]!r}: found {entry.dtype} "
                f"{list(entry.shape)}; accepted: float32 [{half}], half of the "
                "rotated dimensions"
            )
        factors[field] = file.array(entry).data.tolist()
    return {"rope_scaling": {"rope_type": "longrope", **factors}}


def llama3_factors(factor: float, half: int, theta: float) -> NDArray[np.float64]:
    """Return the divisors [half] of Llama 3: 1 for high frequencies, ``factor`` for
    low ones, and a ramp between.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    with np.errstate(all="ignore"):  # the caller's comparison fails for invalid values
        turns = ORIGINAL * theta ** (-np.arange(half) / half) / (2 * np.pi)
        smooth = np.clip((turns - LOW) / (HIGH - LOW), 0.0, 1.0)
        return 1.0 / ((1.0 - smooth) / factor + smooth)
