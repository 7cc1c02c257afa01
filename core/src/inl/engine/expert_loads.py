"""Totals of the tokens that each expert of a mixture has computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inl.weights.expert_copies import device_imbalance, planned_copies

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.config import EngineConfig


class ExpertLoads:
    """Tokens of each expert in the steps that were counted.

    Added to by the thread that steps the engine; others may read.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        """[L, E]: of each expert of each layer that has experts; [0, 0] before the
        first step that was counted."""
        self.steps = 0
        """Steps that were counted."""

    def add(self, loads: NDArray[np.int32]) -> None:
        """Add the loads [L, E] of a step."""
        before = self.counts if self.counts.size else 0
        self.counts = before + loads.astype(np.int64)
        self.steps += 1

    def device_imbalance(self, config: EngineConfig) -> list[float]:
        """Return :meth:`imbalance` of the devices of an engine's placement.

        Of experts with copies each is assumed to compute an equal part. Empty where
        experts are not divided.
        """
        division = config.division
        devices = division.expert * division.data
        if devices == 1 or not self.steps:
            return []
        copies = planned_copies(config, devices, is_mesh=False)
        if copies is None:
            return self.imbalance(devices)
        return [
            device_imbalance(layer.astype(np.float64), order, devices)
            for layer, order in zip(self.counts, copies.orders, strict=True)
        ]

    def imbalance(self, parts: int = 0) -> list[float]:
        """Return the largest load relative to the mean, of each layer: 1 is balanced.

        parts: devices that own the experts in equal parts, whose loads are compared;
        0 compares the experts.
        """
        counts = self.counts
        if parts:
            counts = counts.reshape(len(counts), parts, -1).sum(-1)
        means = counts.mean(-1) if counts.size else np.zeros(0)
        return [
            float(most / mean) if mean else 0.0
            for most, mean in zip(counts.max(-1, initial=0), means, strict=True)
        ]
