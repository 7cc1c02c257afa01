"""Uniform random numbers that are a function of a seed and a position.

Runners have no random generator. The host sends u(seed, position), so a sequence
samples the same tokens alone or in a batch, preempted or not, on every backend.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the increment of SplitMix64's state."""


def mix(value: int) -> int:
    """Mix 64 bits: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that samples the token at ``position``.

    ``position`` counts from the first prompt token. The value is output ``position``
    of a SplitMix64 generator whose state starts at ``mix(seed)``, truncated to its
    upper 24 bits, which float32 represents exactly. Seeds are taken modulo 2**64.
    """
    # An unmixed seed + GOLDEN would give the same stream, shifted by one position.
    return (mix(mix(seed) + (position + 1) * GOLDEN) >> 40) * 2.0**-24
