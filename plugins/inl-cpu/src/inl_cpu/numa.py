"""NUMA: interleave memory over the nodes that compute.

Any thread of the pool takes any chunk, so no page has a single reader. Interleaved
pages are read from the memory of every node in parallel; with first-touch placement all
of them would be on the node of the thread that loads the weights. ``mbind`` is called
as a system call, because libnuma may be missing.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inl.backend.host import read_text
from inl_cpu.cores import allowed_processors

if TYPE_CHECKING:
    from collections.abc import Sequence

NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""System call number by architecture."""
MPOL_INTERLEAVE: Final = 3
WORD: Final = 64
"""Bits in a word of a node mask."""


def usable_nodes() -> list[int]:
    """Nodes whose memory and processors this process may use."""
    lines = read_text(STATUS).splitlines()
    memories = [line.partition(":")[2] for line in lines if "Mems_allowed_list" in line]
    nodes = parse_set(read_text(NODES / "has_memory"))
    if memories:
        nodes &= parse_set(memories[0])
    processors = allowed_processors()
    lists = {node: read_text(NODES / f"node{node}/cpulist") for node in nodes}
    return sorted(node for node in nodes if parse_set(lists[node]) & processors)


def parse_set(text: str) -> set[int]:
    """Parse a kernel list such as "0-3,8"; the empty set for any other text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            return set()
        numbers.update(range(int(first), int(last) + 1))
    return numbers


def interleave(address: int, nbytes: int) -> bool:
    """Interleave the untouched whole pages of a range over all usable nodes.

    Returns whether that was done. It is not done with a single node, nor where the
    system refuses, as many containers do; placement is then first-touch.
    """
    nodes = _cached_nodes()
    return len(nodes) > 1 and bind_pages(address, nbytes, nodes)


def bind_pages(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Call ``mbind`` with the interleave policy; ``False`` if it fails."""
    number = MBIND.get(platform.machine())
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + nbytes) // page * page
    if number is None or end <= first or platform.system() != "Linux":
        return False
    words = max(nodes) // WORD + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // WORD] |= 1 << node % WORD
    # Linux subtracts one from the number of bits that it is passed.
    bits = ctypes.c_ulong(words * WORD + 1)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    start, size = ctypes.c_void_p(first), ctypes.c_ulong(end - first)
    policy, no_flags = ctypes.c_long(MPOL_INTERLEAVE), ctypes.c_long(0)
    result: int = call(ctypes.c_long(number), start, size, policy, mask, bits, no_flags)
    return result == 0


@cache
def _cached_nodes() -> list[int]:
    return usable_nodes()
