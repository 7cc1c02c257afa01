"""Launch parameters by chip; ``inl tune`` adds local measurements.

Nothing here was measured: the tables are derived from the compiler's resource reports,
so that no kernel spills registers or exceeds the LDS, see ``tests/torch/triton``.
"""

from __future__ import annotations

from inl_rocm.chips import MI350, RDNA3, RDNA4, Chip
from inl_torch.triton.tuning import AttentionTile, Tuning

Tiles = dict[tuple[str, int, bool], AttentionTile]
"""(Kind of attention, head size, whether float32) -> tile."""

RDNA: Tiles = {
    ("decode", 64, False): AttentionTile(1, 32, 8, 2),
    ("decode", 128, False): AttentionTile(1, 16, 8, 2),
    ("single", 64, False): AttentionTile(1, 32, 2, 2),
    ("single", 128, False): AttentionTile(1, 32, 4, 2),
    ("prompt", 64, False): AttentionTile(64, 32, 8, 2),
    ("prompt", 128, False): AttentionTile(64, 16, 8, 2),
    ("decode", 64, True): AttentionTile(1, 32, 8, 2),
    ("decode", 128, True): AttentionTile(1, 16, 8, 2),
    ("prompt", 64, True): AttentionTile(32, 16, 8, 2),
    ("prompt", 128, True): AttentionTile(16, 16, 8, 2),
}
"""Chips with 32 lanes: the tiles of NVIDIA's chips spill hundreds of registers."""

ATTENTION: dict[Chip, Tiles] = {
    MI350: {("decode", 128, False): AttentionTile(1, 64, 4, 2)},
    # Without an instruction for float8, two stages of such a cache spill.
    RDNA3: RDNA | {("prompt", 128, False): AttentionTile(64, 16, 8, 1)},
    RDNA4: RDNA,
}
"""Tiles of the chips on which those of NVIDIA's chips spill."""

MAX_HEAD_DIM = 128
"""Largest head size of attention in Triton. Tiles of larger heads spill on chips with
32 lanes, and are not compiled in the tests for the others."""


def chip_tuning(chip: Chip, processors: int) -> Tuning:
    """Launch parameters for a chip of ``processors`` compute units.

    Products of several rows are left to hipBLASLt, and one row uses Triton.
    """
    return Tuning(
        lanes=chip.lanes,
        processors=processors,
        shared_bytes=chip.shared_bytes,
        filters=True,
        attention=ATTENTION.get(chip, {}),
        max_head_dim=MAX_HEAD_DIM,
    )
