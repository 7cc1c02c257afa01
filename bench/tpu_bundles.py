"""Reads what libtpu writes about the kernels that it compiles: instructions and memory.

The format is not documented: it is that of libtpu 0.0.42.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+([A-Z]{2})?\s*:\s*((?:>\s?)*)")
LOOP = "LB"
"""Mark of the first bundle of a loop's body."""

ALLOCATION = re.compile(r"space=vmem, size = 0x([0-9a-f]+)")
SPILL = "VSTORE:SPILL"

STAGES = ("original", "final_bundles", "final_hlo-static-per-bundle-utilization")
"""Stages of the compiler, by their labels: allocations, bundles, and uses of these."""


class Facts(NamedTuple):
    """One compiled kernel."""

    bundles: tuple[int, ...]
    """Instruction bundles of each loop without those within it, in order of their
    first ones; those outside of any come first."""
    depths: tuple[int, ...]
    """Loops around these bundles."""
    spills: tuple[int, ...]
    """Stores of registers that did not suffice, by the same loops."""
    vmem: int
    """Bytes."""

    def cycles(self, runs: tuple[int, ...], loops: tuple[int, ...] = ()) -> int:
        """Bundles times the runs of their loops.

        runs: by depth of loops, of which the first is 1. loops: those of each loop in
        order, used if there are as many loops. Branches that are not taken count as
        well: an upper bound without waits. The compiler drops loops of one run: the
        deepest loop has the last of ``runs``. Returns 0, unknown, for loops of the
        compiler that ``runs`` does not have.
        """
        if loops:
            if len(loops) + 1 != len(self.bundles):
                return 0
            return sum(b * n for b, n in zip(self.bundles, (1, *loops), strict=True))
        deepest = max(self.depths)
        if deepest >= len(runs):
            return 0
        known = (*runs[:deepest], runs[-1])
        return sum(
            count * known[depth]
            for count, depth in zip(self.bundles, self.depths, strict=True)
        )


def loops_of(text: str) -> list[tuple[int, int]]:
    """Return the loop around each bundle, and its depth."""
    latest, found = {0: 0}, []
    for line in text.splitlines():
        if match := BUNDLE.match(line):
            depth = match[2].count(">")
            if match[1] == LOOP or depth not in latest:
                latest[depth] = max(latest.values()) + 1
            found.append((latest[depth], depth))
    return found


def dump_to(folder: Path) -> None:
    """Make libtpu write to a folder; before the first compilation of the process.

    Only what is read: all of its stages take three times as long as the compilation.
    """
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=^({'|'.join(STAGES)})$"
    )


def facts_of(folder: Path, kernel: str) -> Facts:
    """Read the newest dump of a kernel; raises :class:`FileNotFoundError`."""
    allocated, bundles, uses = (newest(folder, kernel, stage) for stage in STAGES)
    found, spilled = loops_of(bundles), spill_counts(uses)
    if len(spilled) != len(found):
        raise ValueError(f"{kernel}: {len(found)} bundles, {len(spilled)} uses of them")
    depths = dict(found)
    owners = [loop for loop, _ in found]
    spills = dict.fromkeys(depths, 0)
    for owner, count in zip(owners, spilled, strict=True):
        spills[owner] += count
    return Facts(
        tuple(owners.count(loop) for loop in sorted(depths)),
        tuple(depths[loop] for loop in sorted(depths)),
        tuple(spills[loop] for loop in sorted(depths)),
        sum(int(size, 16) for size in ALLOCATION.findall(allocated)),
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
