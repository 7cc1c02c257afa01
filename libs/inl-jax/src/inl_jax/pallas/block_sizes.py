"""Block sizes of Pallas kernels, searched for each chip and shape.

``bench/tpu_tune.py TOPOLOGY --write`` writes the table, ``block_sizes.json``: chip,
kernel, shape, then the sizes that are faster than those of the kernel's own rule. No
sizes are listed for a shape whose rule is the fastest. Kernels read it while they are
traced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jax.experimental.pallas import tpu as pltpu

FILE = "block_sizes.json"

Sizes = tuple[tuple[str, int], ...]
"""Names and values in order of the names, as a static argument."""

Table = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""Chip -> kernel -> shape -> {"sizes": ..., "us": ..., "rule us": ...}."""


@cache
def table() -> Table:
    """Return the table of this installation."""
    text = files("inl_jax.pallas").joinpath(FILE).read_text(encoding="utf-8")
    found: Table = json.loads(text)
    return found


def chip() -> str:
    """Return the chip that is traced for, such as "v6e" or "7x"; empty elsewhere."""
    return str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else ""


def searched(kernel: str, shape: str) -> Mapping[str, int]:
    """Return the searched sizes of a kernel and shape on the chip that is traced for.

    Empty where the kernel's rule is the fastest, or the shape was not searched.
    """
    entry = table().get(chip(), {}).get(kernel, {}).get(shape, {})
    sizes: Mapping[str, int] = entry.get("sizes", {})
    return sizes


def chosen(sizes: Sizes, kernel: str, shape: str) -> Mapping[str, int]:
    """Return ``sizes`` if there are any, else those of the table."""
    return dict(sizes) if sizes else searched(kernel, shape)


def static(sizes: Mapping[str, int]) -> Sizes:
    """Return sizes as a static argument."""
    return tuple(sorted(sizes.items()))
