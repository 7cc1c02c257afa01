"""Uniform numbers that depend on nothing but a seed and a position.

No runner has a random generator: the host sends u(seed, position), so a sequence draws
the same tokens alone or in a batch, preempted or not, on every backend.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: the step between two states of SplitMix64."""


def mix(value: int) -> int:
    """Scramble 64 bits: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that chooses the token at ``position``.

    ``position`` counts from the first prompt token. The value is output ``position``
    of a SplitMix64 generator whose state starts at ``mix(seed)``, cut to its upper 24
    bits so that float32 holds it exactly. Seeds are taken modulo 2**64.
    """
    # The seed is scrambled first: bare, seed + GOLDEN would be the same stream shifted.
    return (mix(mix(seed) + (position + 1) * GOLDEN) >> 40) * 2.0**-24
