"""Reads what libtpu writes about the kernels that it compiles: instructions and memory.

The format is not documented: it is that of libtpu 0.0.42.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*((?:>\s?)*)")
ALLOCATION = re.compile(r"space=vmem, size = 0x([0-9a-f]+)")
SPILL = "VSTORE:SPILL"


class Facts(NamedTuple):
    """One compiled kernel."""

    bundles: tuple[int, ...]
    """Instruction bundles by depth of the loops around them; 0 is outside of any."""
    spills: tuple[int, ...]
    """Stores of registers that did not suffice, by the same depths."""
    vmem: int
    """Bytes."""

    def cycles(self, runs: tuple[int, ...]) -> int:
        """Bundles times the runs of each depth, of which the first is 1.

        Branches that are not taken count as well: an upper bound without waits. The
        compiler drops loops of one run: the deepest loop has the last of ``runs``.
        Returns 0, unknown, for loops of the compiler that ``runs`` does not have.
        """
        depths = len(self.bundles)
        if depths > len(runs):
            return 0
        known = (*runs[: depths - 1], runs[-1])
        return sum(b * n for b, n in zip(self.bundles, known, strict=True))


def dump_to(folder: Path) -> None:
    """Make libtpu write to a folder; before the first compilation of the process."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    )


def facts_of(folder: Path, kernel: str) -> Facts:
    """Read the newest dump of a kernel; raises :class:`FileNotFoundError`."""
    depths = [
        match[1].count(">")
        for line in newest(folder, kernel, "final_bundles").splitlines()
        if (match := BUNDLE.match(line))
    ]
    spilled = spill_counts(
        newest(folder, kernel, "final_hlo-static-per-bundle-utilization")
    )
    if len(spilled) != len(depths):
        raise ValueError(
            f"{kernel}: {len(depths)} bundles, {len(spilled)} uses of them"
        )
    levels = range(max(depths) + 1)
    return Facts(
        tuple(depths.count(level) for level in levels),
        tuple(
            sum(n for n, depth in zip(spilled, depths, strict=True) if depth == level)
            for level in levels
        ),
        sum(
            int(size, 16)
            for size in ALLOCATION.findall(newest(folder, kernel, "02-original"))
        ),
    )


def newest(folder: Path, kernel: str, stage: str) -> str:
    """Return the newest file of a kernel and a stage of the compiler."""
    name = re.compile(rf"\d+-{kernel}(\.\d+)?-(\d+-)?{stage}\.txt")
    found = sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
    if not found:
        raise FileNotFoundError(f"{folder}: no {stage} of {kernel}")
    return found[-1].read_text()


def spill_counts(text: str) -> list[int]:
    """Return the spills of each bundle."""
    lines = text.splitlines()
    column = next(line for line in lines if SPILL in line).split(", ").index(SPILL)
    start = next(i for i, line in enumerate(lines) if "UTILIZATION" in line)
    return [int(line.split()[column]) for line in lines[start + 1 :] if line.strip()]
