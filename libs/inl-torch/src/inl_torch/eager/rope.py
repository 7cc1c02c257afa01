"""Rotary position embedding."""

from __future__ import annotations

from functools import cache

import torch

from inl.ops.rope import RopeScaling, frequencies, gains
from inl.spec.kernel import Kernel


# Cached forever: captured graphs read from the address.
@cache
def plane_frequencies(
    dim: int, theta: float, scaling: RopeScaling, place: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Radians per position of each plane, and its gain if not 1; float64 [dim / 2]."""
    frequency = torch.from_numpy(frequencies(dim, theta, scaling)).to(place)
    if scaling.gain == 1:
        return frequency, None
    return frequency, torch.from_numpy(gains(dim, scaling)).to(place)


def rope_table(
    positions: torch.Tensor, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[torch.Tensor, torch.Tensor]:
    frequency, gain = plane_frequencies(dim, theta, scaling, positions.device)
    angles = positions.unsqueeze(1) * frequency
    cos, sin = angles.cos(), angles.sin()
    if gain is not None:
        cos, sin = cos * gain, sin * gain
    return cos.float(), sin.float()


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = q.dtype
    both = torch.cat((q, k), 1)
    if dtype != torch.float32:
        both = both.float()
    a, b = both.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left = torch.addcmul(a * cos, b, sin, value=-1)
    rotated = torch.cat((left, torch.addcmul(b * cos, a, sin)), -1)
    if dtype != torch.float32:
        rotated = rotated.to(dtype)
    first, second = rotated.split_with_sizes((q.shape[1], k.shape[1]), 1)
    return first, second


def temper_queries(
    q: torch.Tensor, positions: torch.Tensor, *, floor: int, gain: float
) -> torch.Tensor:
    steps = ((positions + 1) // floor).to(torch.float32)
    factor = 1 + gain * steps.log1p()
    return (q * factor[:, None, None]).to(q.dtype)


KERNELS = (
    Kernel("temper_queries", "eager", temper_queries, invariant=True),
    Kernel("rope_table", "eager", rope_table),
    Kernel("rope", "eager", rope),
)
