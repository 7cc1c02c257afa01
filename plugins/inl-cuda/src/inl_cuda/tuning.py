"""What was measured best on NVIDIA's chips; ``inl tune`` adds to it on a machine."""

from __future__ import annotations

import torch

from inl_torch.triton.attention.attention import shared_bytes
from inl_torch.triton.tuning import Tile, Tuning

HOPPER: dict[tuple[str, int, int], Tile] = {
    ("plain", 576, 1536): Tile(8, 2048, 8),
    ("gated", 1536, 576): Tile(2, 1024, 1),
    ("norm", 960, 576): Tile(1, 1024, 1),
    ("norm", 49152, 576): Tile(4, 1024, 1),
    ("plain", 4096, 14336): Tile(2, 1024, 1),
    ("gated", 14336, 4096): Tile(4, 1024, 4),
    ("norm", 6144, 4096): Tile(2, 2048, 8),
    ("plain", 4096, 4096): Tile(2, 1024, 1),
    ("plain", 6144, 4096): Tile(2, 2048, 8),
    ("norm", 128256, 4096): Tile(4, 256, 1),
}
"""H200, triton 3.6, bfloat16: (kind of product, rows, columns) of the matrix. Several
rows go by the rule, which was measured there.

Chosen by the time of whole steps, in which a kernel reads its weights while the one
before it ends."""


def tuning(place: torch.device) -> Tuning:
    """What is known for the chip at ``place``."""
    facts = torch.cuda.get_device_properties(place)
    hopper = (facts.major, facts.minor) == (9, 0)
    return Tuning(
        early=facts.major >= 9,
        processors=facts.multi_processor_count,
        few_rows=32,
        shared_bytes=shared_bytes(place),
        filters=hopper,
        tiles=HOPPER if hopper else {},
    )
