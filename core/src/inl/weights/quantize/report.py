"""What quantization of a model did: the error of each matrix, and the bytes."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

KINDS: Final = {"fp8": "mxfp8", "int8": "q8_0", "int4": "q4_1"}
"""Kinds of quantization, and the dtype of their blocks of 32 weights: E4M3 with a power
of two, int8 with a scale, 4 bits with a scale and an offset."""


class LayerError(NamedTuple):
    """A quantized matrix."""

    name: str
    error: float
    """Norm of the change of its weights, relative to their norm."""
    bytes_before: int
    bytes_after: int
    norm: float
    """Norm of its weights before."""


class QuantizationReport(NamedTuple):
    """The measured result of a quantization."""

    dtype: str
    layers: tuple[LayerError, ...]

    @property
    def error(self) -> float:
        """Largest relative error of a layer."""
        return max((layer.error for layer in self.layers), default=0.0)

    @property
    def rms_error(self) -> float:
        """Relative RMS error over the weights of all layers."""
        norm = math.hypot(*(layer.norm for layer in self.layers))
        change = math.hypot(*(layer.error * layer.norm for layer in self.layers))
        return change / norm if norm else 0.0

    def describe(self) -> str:
        """Return one line: matrices, errors, and bytes before and after."""
        if not self.layers:
            return f"{self.dtype}: no matrices were quantized"
        worst = max(self.layers, key=lambda layer: layer.error)
        before = sum(layer.bytes_before for layer in self.layers)
        after = sum(layer.bytes_after for layer in self.layers)
        return (
            f"{self.dtype}: {len(self.layers)} matrices quantized, "
            f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB; relative RMS error of "
            f"the weights {self.rms_error:.3%}, largest {worst.error:.3%} in "
            f"{worst.name}"
        )
