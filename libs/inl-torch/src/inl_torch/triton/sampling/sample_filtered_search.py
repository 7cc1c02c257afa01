"""The search for the least likely token that a filter keeps; a pass is a launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.step import PARAMS
from inl_torch.triton.pdl import follow
from inl_torch.triton.sampling.reductions import best

BITS = tl.constexpr(4)
WAYS = tl.constexpr(16)
"""Parts of a window."""

WHOLE = tl.constexpr(31)
"""Bits of the first window; the highest of a key is the sign, which is never set."""

COARSE = tl.constexpr(28)
FINE = tl.constexpr(22)
MIDDLE = tl.constexpr(254)
"""The first window has eight parts of 28 bits, but from a gap of 1 (key >> 22 is 254)
to one of 16, where most filters' edges lie, eight of 22 bits."""

END = tl.constexpr(0x7FFFFFFF)
"""Above every key: all is kept."""

LANES = tl.constexpr(128)
"""Threads of a program, each of which adds up its own logits until the last."""

TOP_K = tl.constexpr(PARAMS.index("top_k"))
TOP_P = tl.constexpr(PARAMS.index("top_p"))


@triton.jit
def following(
    chosen: tensor, chunk: tensor, at: tensor, CHUNKS: tl.constexpr,
) -> tensor:  # fmt: skip
    """The first chunk after ``at`` that is chosen, or past them all."""
    return tl.min(tl.where(chosen & (chunk > at), chunk, CHUNKS), 0)


@triton.jit
def logits_of(
    changed: tensor, sample: tensor, chunk: tensor, V: tensor, CHUNK: tl.constexpr,
) -> tensor:  # fmt: skip
    """A chunk's logits; past the last there are none."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(changed + sample * V + at, mask=at < V, other=float("-inf"))


@triton.jit
def keys_of(
    x: tensor, peak: tensor, heat: tensor,
) -> tuple[tensor, tensor]:  # fmt: skip
    """How far below the highest some logits are, as whole numbers, and their masses."""
    scaled = (x - peak) / heat
    return (0.0 - scaled).to(tl.int32, bitcast=True), tl.exp(scaled)


@triton.jit
def own_chunks(
    CHUNKS: tl.constexpr, PIECES: tl.constexpr, PIECES_P: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """The chunks of this program's group, and which of them there are."""
    place = tl.arange(0, PIECES_P)
    chunk = tl.program_id(1) * PIECES + place
    return chunk, (place < PIECES) & (chunk < CHUNKS)


@triton.jit
def nearest(
    peaks: tensor, sample: tensor, chunk: tensor, there: tensor, peak: tensor,
    heat: tensor, CHUNKS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """The least key of each chunk and its mass, without a look at the chunk."""
    top = tl.load(peaks + sample * CHUNKS + chunk, mask=there, other=0)
    least, mass = keys_of(top, peak, heat)
    return least, mass


@triton.jit
def _either(a: tensor, b: tensor) -> tensor:
    return a | b


@triton.jit
def _part(key: tensor) -> tensor:
    """The part of the first window in which a key is."""
    fine = key >> FINE
    inner = fine - MIDDLE + 4
    coarse = key >> COARSE
    return tl.where(
        fine < MIDDLE, coarse, tl.where(inner < 12, inner, coarse + 8)
    )  # fmt: skip


@triton.jit
def _start(part: tensor) -> tensor:
    """The least key of a part of the first window."""
    inner = (tl.minimum(part, 12) - 4 + MIDDLE) << FINE
    outer = tl.where(part < 4, part, tl.maximum(part - 8, 0)) << COARSE
    return tl.where(part < 4, outer, tl.maximum(inner, outer))


@triton.jit
def _told(
    table: tensor, sample: tensor, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """What all groups have in each part of the window that the pass before searched."""
    way = tl.arange(0, WAYS)[:, None]
    group = tl.arange(0, GROUPS_P)[None, :]
    cells = (sample * WAYS + way) * GROUPS + group
    return tl.sum(tl.load(table + cells, mask=group < GROUPS, other=0), 1)


@triton.jit
def decide(
    table: tensor, windows: tensor, below: tensor, sample: tensor, goal: tensor,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
) -> tuple[tensor, tensor, tensor, tensor]:  # fmt: skip
    """The part in which a pass found its goal: number, least key, bits, weight below.

    A window of no bits is one key, and was searched. Some parts have fewer keys than
    bits say: what a pass then counts beyond its window comes after all that is in it.
    """
    bound = tl.load(windows + sample * 2)
    bits = tl.load(windows + sample * 2 + 1)
    under = tl.load(below + sample)
    found = 0
    if bits > 0:
        upto = under + tl.cumsum(_told(table, sample, GROUPS, GROUPS_P), 0)
        found = tl.minimum(tl.sum((upto < goal).to(tl.int32), 0), WAYS - 1)
        way = tl.arange(0, WAYS)
        ahead = tl.sum(tl.where(way == found - 1, upto, 0.0), 0)
        under = tl.where(found > 0, ahead, under)
        if bits == WHOLE:
            bound = _start(found)
            bits = tl.where((found >= 4) & (found < 12), FINE, COARSE)
        else:
            bits = tl.maximum(bits - BITS, 0)
            bound += found << bits
    return found, bound, bits, under


@triton.jit
def _goal(
    table: tensor, windows: tensor, edges: tensor, rooms: tensor, goals: tensor,
    top_p: tensor, sample: tensor, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """The mass that top-p wants of what top-k keeps; the first pass weighs that."""
    goal = tl.load(goals + sample)
    if tl.load(windows + sample * 2 + 1) == WHOLE:
        total = tl.sum(_told(table, sample, GROUPS, GROUPS_P), 0)
        each = tl.exp(0.0 - tl.load(edges + sample).to(tl.float32, bitcast=True))
        # Where there are fewer tokens than k, no token has the edge's key.
        ties = tl.where(each > 0, each * tl.load(rooms + sample), 0.0)
        goal = top_p * (total + ties)
    return goal


@triton.jit
def _weights(
    changed: tensor, sample: tensor, chunk: tensor, chosen: tensor, peak: tensor,
    heat: tensor, edge: tensor, bound: tensor, bits: tensor, V: tensor,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PIECES_P: tl.constexpr,
    FIRST: tl.constexpr, BY_MASS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """What the chosen chunks have in each part, and which parts each of them holds."""
    shift = tl.maximum(bits - BITS, 0)
    way = tl.arange(0, WAYS)
    weights = tl.zeros([WAYS, LANES], tl.float32)
    holds = tl.zeros([PIECES_P], tl.int32)
    at = following(chosen, chunk, -1, CHUNKS)
    x = logits_of(changed, sample, at, V, CHUNK)
    while at < CHUNKS:
        # The next chunk is on its way while this one is weighed.
        after = following(chosen, chunk, at, CHUNKS)
        ahead = logits_of(changed, sample, after, V, CHUNK)
        key, mass = keys_of(x, peak, heat)
        part = _part(key) if FIRST else (key - bound) >> shift
        inside = (at * CHUNK + tl.arange(0, CHUNK) < V) & (key < edge)
        inside = inside & (part >= 0) & (part < WAYS)
        part = tl.where(inside, part, WAYS)
        bit = tl.reduce(1 << part, 0, _either)
        holds = tl.where(chunk == at, bit, holds)
        part = tl.reshape(part, (1, CHUNK // (4 * LANES), LANES, 4))
        alike = part == way[:, None, None, None]
        if BY_MASS:
            mass = tl.reshape(mass, (1, CHUNK // (4 * LANES), LANES, 4))
            weights += tl.sum(tl.sum(tl.where(alike, mass, 0.0), 3), 1)
        else:
            weights += tl.sum(tl.sum(alike.to(tl.float32), 3), 1)
        at, x = after, ahead
    return weights, holds


@triton.jit
def weigh(
    changed: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    goals: tensor, edges: tensor, rooms: tensor, table: tensor, windows: tensor,
    below: tensor, held: tensor, new_table: tensor, new_windows: tensor,
    new_below: tensor, new_held: tensor, V: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    PIECES: tl.constexpr, PIECES_P: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_P: tl.constexpr, FIRST: tl.constexpr, BY_MASS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One pass of a search: what a group of chunks has in each part of a window.

    What the pass before left, and this one leaves: table [S, WAYS, GROUPS], windows
    [S, 2] of a least key and a number of bits, below [S], the weight below them, and
    held [S, CHUNKS], a bit for each part in which a chunk has a key. The first pass by
    mass follows the last by count, and leaves top-k's edges [S] (least likely key that
    is kept) and rooms [S] (how many tokens of that key).
    """
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    leads = tl.program_id(1) == 0
    mine = settings + tl.load(slots + sample).to(tl.int64) * COLUMNS
    heat, top_k, top_p = tl.load(mine), tl.load(mine + TOP_K), tl.load(mine + TOP_P)
    if heat <= 0:
        return
    edge, goal = END, top_k
    if BY_MASS:
        if FIRST:
            room = float("inf")
            if top_k >= 1:
                _, edge, _, less = decide(
                    table, windows, below, sample, top_k, GROUPS, GROUPS_P
                )  # fmt: skip
                room = top_k - less
            if leads:
                tl.store(edges + sample, edge)
                tl.store(rooms + sample, room)
        else:
            edge = tl.load(edges + sample)
    if (top_p >= 1) if BY_MASS else (top_k < 1):
        return
    peak, _ = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    chunk, there = own_chunks(CHUNKS, PIECES, PIECES_P)
    bound, bits, under = 0, WHOLE, 0.0
    if FIRST:
        least, _ = nearest(peaks, sample, chunk, there, peak, heat, CHUNKS)
        chosen = there & (least < edge)
    else:
        if BY_MASS:
            goal = _goal(
                table, windows, edges, rooms, goals, top_p, sample, GROUPS, GROUPS_P
            )  # fmt: skip
            if leads:
                tl.store(goals + sample, goal)
        found, bound, bits, under = decide(
            table, windows, below, sample, goal, GROUPS, GROUPS_P
        )  # fmt: skip
        holds = tl.load(held + sample * CHUNKS + chunk, mask=there, other=0)
        chosen = ((holds >> found) & 1) > 0
    if leads:
        tl.store(new_windows + sample * 2, bound)
        tl.store(new_windows + sample * 2 + 1, bits)
        tl.store(new_below + sample, under)
    if bits == 0:
        return
    weights, holds = _weights(
        changed, sample, chunk, chosen, peak, heat, edge, bound, bits, V, CHUNKS, CHUNK,
        PIECES_P, FIRST, BY_MASS,
    )  # fmt: skip
    tl.store(new_held + sample * CHUNKS + chunk, holds, mask=there)
    cells = (sample * WAYS + tl.arange(0, WAYS)) * GROUPS + tl.program_id(1)
    tl.store(new_table + cells, tl.sum(weights, 1))
