"""Memory on machines with several nodes: spread over those that compute.

Any thread of the pool takes any chunk, so no page has one reader. Spread page by page,
what all of them read comes from every node's memory at once; first touched by whoever
loads the weights, it would all come from one. ``mbind`` is called as the system call
that it is, for libnuma may be missing.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inl_cpu.cores import allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
MBIND: Final = {"x86_64": 237, "aarch64": 235}
INTERLEAVE: Final = 3
WORD: Final = 64
"""Bits of a word of a set of nodes."""


def nodes() -> list[int]:
    """Nodes that have memory for this process and processors that it may run on."""
    lines = _read(STATUS).splitlines()
    memories = [line.partition(":")[2] for line in lines if "Mems_allowed_list" in line]
    granted = numbers(memories[0]) if memories else None
    having = numbers(_read(NODES / "has_memory"))
    found = having if granted is None else having & granted
    runs = allowed()
    return sorted(n for n in found if numbers(_read(NODES / f"node{n}/cpulist")) & runs)


def numbers(text: str) -> set[int]:
    """The set that the system writes as "0-3,8"; empty for any other text."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            return set()
        found.update(range(int(first), int(last) + 1))
    return found


def spread(address: int, nbytes: int) -> bool:
    """Lay whole pages that nobody has touched yet on all nodes in turn.

    Whether that was done: not with one node, nor where the system refuses, as many
    containers do; pages then lie where they are first touched.
    """
    known = _nodes()
    return len(known) > 1 and interleave(address, nbytes, known)


def interleave(address: int, nbytes: int, known: Sequence[int]) -> bool:
    """Ask the system to; ``False`` where it does not."""
    number = MBIND.get(platform.machine())
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + nbytes) // page * page
    if number is None or end <= first or platform.system() != "Linux":
        return False
    words = max(known) // WORD + 1
    mask = (ctypes.c_uint64 * words)()
    for node in known:
        mask[node // WORD] |= 1 << node % WORD
    # The kernel takes one bit less than it is told of.
    bits = ctypes.c_ulong(words * WORD + 1)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    place, size = ctypes.c_void_p(first), ctypes.c_ulong(end - first)
    done: int = call(
        ctypes.c_long(number), place, size, ctypes.c_long(INTERLEAVE), mask, bits,
        ctypes.c_long(0),
    )  # fmt: skip
    return done == 0


@cache
def _nodes() -> list[int]:
    return nodes()


def _read(place: Path) -> str:
    try:
        return place.read_text()
    except OSError:
        return ""
