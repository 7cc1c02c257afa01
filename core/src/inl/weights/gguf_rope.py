"""Rotation frequencies that GGUF files of Llama 3 keep as a tensor of divisors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inl.errors import CheckpointError
from inl.weights.files import Entry, MappedFile

ROPE_FACTORS: Final = "rope_freqs.weight"

LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
"""What all files of Llama 3.1 to 3.3 have; only the largest divisor differs."""


def rope_config(
    file: MappedFile, entry: Entry, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``rope_scaling`` field that gives the divisors of ``entry``.

    Raises :class:`CheckpointError` where they are not those of Llama 3's rule.
    """
    half = config.get("head_dim", 0) // 2
    if entry.dtype != "float32" or entry.shape != (half,) or half == 0:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r}: found {entry.dtype} "
            f"{list(entry.shape)}; accepted: float32 [{half}], half a head"
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


def llama3_factors(factor: float, half: int, theta: float) -> NDArray[np.float64]:
    """Divisors [half]: 1 for fast rotations, ``factor`` for slow ones, a ramp between.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    with np.errstate(all="ignore"):  # a damaged theta or factor fails the comparison
        turns = ORIGINAL * theta ** (-np.arange(half) / half) / (2 * np.pi)
        smooth = np.clip((turns - LOW) / (HIGH - LOW), 0.0, 1.0)
        return 1.0 / ((1.0 - smooth) / factor + smooth)
