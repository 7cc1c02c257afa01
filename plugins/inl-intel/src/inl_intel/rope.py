"""Rotation table without float64, which Intel's Arc GPUs do not have."""

from __future__ import annotations

import math
from functools import cache

import torch

from inl.ops.rope import RopeScaling, frequencies, gains
from inl.spec.kernel import Kernel

PREFERENCE = 20
"""Above the kernels of torch and Triton, which compute angles in float64."""

TURN = 2.0**64
"""A turn in fixed point: products with positions wrap at whole turns."""


@cache
def plane_turns(
    dim: int, theta: float, scaling: RopeScaling, place: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turns per position of each plane, int64 in units of 2**-64, and its gain if not
    1, float32: [dim / 2].
    """
    turns = frequencies(dim, theta, scaling) / (2 * math.pi) * TURN
    fixed = torch.from_numpy(turns.astype("int64")).to(place)
    if scaling.gain == 1:
        return fixed, None
    return fixed, torch.from_numpy(gains(dim, scaling).astype("float32")).to(place)


def rope_table(
    positions: torch.Tensor, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    turns, gain = plane_turns(dim, theta, scaling, positions.device)
    angles = (positions.long().unsqueeze(1) * turns).float() * (2 * math.pi / TURN)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if gain is None else (cos * gain, sin * gain)


KERNELS = (
    Kernel("rope_table", "eager_fixed_point", rope_table, preference=PREFERENCE),
)
