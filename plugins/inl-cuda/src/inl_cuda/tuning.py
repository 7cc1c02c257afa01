"""Launch parameters measured on NVIDIA GPUs; ``inl tune`` adds local measurements."""

from __future__ import annotations

import torch

from inl.backend.tunable import Facts
from inl_cuda.probe import driver_version
from inl_torch.gpu.backend import distribution_version
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
"""(kind of product, rows, columns of the matrix) -> tile, for one row of activations.

H200, Triton 3.6, bfloat16. Chosen by the time of whole steps, in which a kernel reads
its weights while the previous one ends. Products of several rows follow the rules of
:meth:`Tuning.tile`, which were measured there too."""


LONG_ROW_TOKENS = 1024
"""Fewest new tokens of a row whose keys are gathered. Shorter rows read few keys more
than once."""


def tuning(place: torch.device) -> Tuning:
    """Launch parameters for the chip at ``place``."""
    properties = torch.cuda.get_device_properties(place)
    hopper = (properties.major, properties.minor) == (9, 0)
    return Tuning(
        pdl=properties.major >= 9,
        processors=properties.multi_processor_count,
        long_row_tokens=LONG_ROW_TOKENS if hopper else 0,
        max_rows=32,
        shared_bytes=shared_bytes(place),
        max_streamed_rows=32 if hopper else 0,
        filters=hopper,
        tiles=HOPPER if hopper else {},
    )


def tuning_facts(place: torch.device) -> Facts:
    """Chip and software versions for which tuning results are valid."""
    return Facts(
        device=torch.cuda.get_device_name(place),
        driver=driver_version(),
        compiler=f"triton {distribution_version('triton')}",
        plugin=f"inl-cuda {distribution_version('inl-cuda')}",
    )
