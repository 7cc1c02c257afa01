"""The programs behind :mod:`inl_torch.triton.sample_full`, in the order of a step."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.values import PARAMS
from inl_torch.triton.peaks import best, peak_of
from inl_torch.triton.programs import follow

BITS = tl.constexpr(4)
WAYS = tl.constexpr(16)
FIRST = tl.constexpr(28)
"""Shift of a search's first pass; the highest bit is the sign, which is never set."""

END = tl.constexpr(0x7FFFFFFF)
"""Above every key: all is kept."""

TOP_K = tl.constexpr(PARAMS.index("top_k"))
TOP_P = tl.constexpr(PARAMS.index("top_p"))
MIN_P = tl.constexpr(PARAMS.index("min_p"))
REPEATED = tl.constexpr(PARAMS.index("repetition_penalty"))
PRESENT = tl.constexpr(PARAMS.index("presence_penalty"))
FREQUENT = tl.constexpr(PARAMS.index("frequency_penalty"))


@triton.jit
def count_fed(
    fed: tensor, starts: tensor, slots: tensor, used: tensor, counts: tensor, T: tensor,
    V: tensor, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Count the token that a decoding row was fed."""
    follow(EARLY)
    row = tl.program_id(0)
    if row < tl.load(used):
        first = tl.minimum(tl.load(starts + row), T - 1)
        token = tl.load(fed + first).to(tl.int64)
        cell = counts + tl.load(slots + row).to(tl.int64) * V + token
        tl.store(cell, tl.load(cell) + 2)


@triton.jit
def penalize(
    logits: tensor, counts: tensor, bias: tensor, settings: tensor, slots: tensor,
    changed: tensor, peaks: tensor, ids: tensor, stride: tensor, V: tensor,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """A chunk's logits after penalties and bias, and the highest of them."""
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    mine = settings + slot * COLUMNS
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits + sample * stride + at, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    count = tl.load(counts + slot * V + at, mask=inside, other=0)
    factor = tl.load(mine + REPEATED)
    factor = tl.where(count > 0, tl.where(factor > 0, factor, 1.0), 1.0)
    x = tl.where(x > 0, x / factor, x * factor)
    answered = count >> 1
    frequency = tl.load(mine + FREQUENT) * answered.to(tl.float32)
    presence = tl.load(mine + PRESENT) * (answered > 0).to(tl.float32)
    x = x - frequency - presence
    x += tl.load(bias + slot * V + at, mask=inside, other=0)
    tl.store(changed + sample * V + at, x, mask=inside)
    peak, found = peak_of(x, at, V)
    tl.store(peaks + sample * CHUNKS + tl.program_id(1), peak)
    tl.store(ids + sample * CHUNKS + tl.program_id(1), found)


@triton.jit
def _keys(
    changed: tensor, sample: tensor, at: tensor, peak: tensor, heat: tensor, V: tensor,
) -> tuple[tensor, tensor]:  # fmt: skip
    """How far below the highest some logits are, as whole numbers, and their masses."""
    x = tl.load(changed + sample * V + at, mask=at < V, other=float("-inf"))
    scaled = (x - peak) / heat
    return (0.0 - scaled).to(tl.int32, bitcast=True), tl.exp(scaled)


@triton.jit
def _decide(
    counted: tensor, weighed: tensor, bounds: tensor, below: tensor, sample: tensor,
    goal: tensor, SHIFT: tl.constexpr, BY_MASS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_P: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Where the pass before found its goal: least key, and count and mass below it."""
    way = tl.arange(0, WAYS)
    chunk = tl.arange(0, CHUNKS_P)[None, :]
    cells = (sample * WAYS + way[:, None]) * CHUNKS + chunk
    count = tl.sum(tl.load(counted + cells, mask=chunk < CHUNKS, other=0), 1)
    mass = tl.sum(tl.load(weighed + cells, mask=chunk < CHUNKS, other=0), 1)
    found = tl.sum(((mass if BY_MASS else count) < goal).to(tl.int32), 0)
    found = tl.minimum(found, 7 if SHIFT == FIRST else WAYS - 1)
    bound, less, lighter = 0, 0.0, 0.0
    if SHIFT != FIRST:
        bound = tl.load(bounds + sample)
        less = tl.load(below + sample * 2)
        lighter = tl.load(below + sample * 2 + 1)
    ahead = way == found - 1
    less = tl.where(found > 0, tl.sum(tl.where(ahead, count, 0.0), 0), less)
    lighter = tl.where(found > 0, tl.sum(tl.where(ahead, mass, 0.0), 0), lighter)
    return bound + (found << SHIFT), less, lighter


@triton.jit
def weigh(
    changed: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    counted: tensor, weighed: tensor, bounds: tensor, below: tensor, goals: tensor,
    V: tensor, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BY_MASS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One pass of a search: what a chunk has up to sixteen bounds.

    counted, weighed: [2, S, WAYS, CHUNKS], of which a pass writes one and reads the
    other. bounds, below: likewise [2, S] and [2, S, 2]. goals: [S] masses to keep,
    where by mass.
    """
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    samples = tl.num_programs(0)
    slot = tl.load(slots + sample).to(tl.int64)
    mine = settings + slot * COLUMNS
    heat = tl.load(mine)
    wanted = tl.load(mine + (TOP_P if BY_MASS else TOP_K))
    if heat <= 0:
        return
    if (wanted >= 1) if BY_MASS else (wanted < 1):
        return
    turn: tl.constexpr = (SHIFT // BITS) % 2
    bound = 0
    if SHIFT != FIRST:
        ahead = samples.to(tl.int64) * (1 - turn)
        if BY_MASS:
            wanted = tl.load(goals + sample)
        bound, less, lighter = _decide(
            counted + ahead * WAYS * CHUNKS, weighed + ahead * WAYS * CHUNKS,
            bounds + ahead, below + ahead * 2, sample, wanted, SHIFT + BITS, BY_MASS,
            CHUNKS, CHUNKS_P,
        )  # fmt: skip
        if tl.program_id(1) == 0:
            here = samples.to(tl.int64) * turn + sample
            tl.store(bounds + here, bound)
            tl.store(below + here * 2, less)
            tl.store(below + here * 2 + 1, lighter)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    peak, _ = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    key, mass = _keys(changed, sample, at, peak, heat, V)
    way = tl.arange(0, WAYS)
    upto = (key >> SHIFT)[None, :] <= ((bound >> SHIFT) + way)[:, None]
    upto = upto & (at < V)[None, :]
    cells = ((samples.to(tl.int64) * turn + sample) * WAYS + way) * CHUNKS
    cells += tl.program_id(1)
    tl.store(counted + cells, tl.sum(upto.to(tl.float32), 1))
    tl.store(weighed + cells, tl.sum(tl.where(upto, mass[None, :], 0.0), 1))


@triton.jit
def between(
    settings: tensor, slots: tensor, counted: tensor, weighed: tensor, bounds: tensor,
    below: tensor, goals: tensor, edges: tensor, rooms: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """What top-k keeps, and the mass that top-p wants of it; one program a sample.

    edges: [S] least likely key that is kept. rooms: [S] how many tokens of that key.
    The first pass by mass is over, and wrote the other turn than the last by count.
    """
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    samples = tl.num_programs(0).to(tl.int64)
    mine = settings + tl.load(slots + sample).to(tl.int64) * COLUMNS
    top_k, top_p = tl.load(mine + TOP_K), tl.load(mine + TOP_P)
    hot = tl.load(mine) > 0
    edge, room, total = END, float("inf"), 0.0
    if hot & (top_k >= 1):
        edge, less, total = _decide(
            counted, weighed, bounds, below, sample, top_k, 0, False, CHUNKS, CHUNKS_P
        )  # fmt: skip
        room = top_k - less
        each = tl.exp(0.0 - edge.to(tl.float32, bitcast=True))
        # Where there are fewer tokens than k, no token has the edge's key.
        total += tl.where(each > 0, each * room, 0.0)
    elif hot & (top_p < 1):
        chunk = tl.arange(0, CHUNKS_P)
        cells = ((samples + sample) * WAYS + WAYS - 1) * CHUNKS + chunk
        total = tl.sum(tl.load(weighed + cells, mask=chunk < CHUNKS, other=0), 0)
    tl.store(edges + sample, edge)
    tl.store(rooms + sample, room)
    tl.store(goals + sample, top_p * total)


@triton.jit
def keep(
    changed: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    counted: tensor, weighed: tensor, bounds: tensor, below: tensor, goals: tensor,
    edges: tensor, rooms: tensor, masses: tensor, ties: tensor, V: tensor,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The mass of a chunk's kept tokens, but of the edge's key their number.

    edges, rooms: [2, S], of which top-k's are read and those of both filters written.
    """
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    samples = tl.num_programs(0).to(tl.int64)
    mine = settings + tl.load(slots + sample).to(tl.int64) * COLUMNS
    heat, top_p, min_p = (
        tl.load(mine), tl.load(mine + TOP_P), tl.load(mine + MIN_P)
    )  # fmt: skip
    if heat <= 0:
        return
    edge, room = tl.load(edges + sample), tl.load(rooms + sample)
    if top_p < 1:
        goal = tl.load(goals + sample)
        bound, _, lighter = _decide(
            counted, weighed, bounds, below, sample, goal, 0, True, CHUNKS, CHUNKS_P
        )  # fmt: skip
        each = tl.exp(0.0 - bound.to(tl.float32, bitcast=True))
        few = tl.maximum(tl.ceil((goal - lighter) / each), 1.0)
        # The stricter filter's edge counts; where both have the same, its fewer tokens.
        both = tl.where(bound > edge, room, tl.minimum(room, few))
        room = tl.where(bound < edge, few, both)
        edge = tl.minimum(edge, bound)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    peak, _ = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    key, mass = _keys(changed, sample, at, peak, heat, V)
    likely = (mass >= min_p) & (at < V)
    cell = sample * CHUNKS + tl.program_id(1)
    tl.store(masses + cell, tl.sum(tl.where(likely & (key < edge), mass, 0.0), 0))
    tl.store(ties + cell, tl.sum((likely & (key == edge)).to(tl.float32), 0))
    if tl.program_id(1) == 0:
        tl.store(edges + samples + sample, edge)
        tl.store(rooms + samples + sample, room)


@triton.jit
def draw(
    changed: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    edges: tensor, rooms: tensor, masses: tensor, ties: tensor, uniforms: tensor,
    tokens: tensor, last: tensor, V: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Decide on one sample's token, as :func:`inl_torch.triton.sample._pick` does."""
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    samples = tl.num_programs(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    peak, token = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    heat = tl.load(settings + slot * COLUMNS)
    if heat > 0:
        min_p = tl.load(settings + slot * COLUMNS + MIN_P)
        edge = tl.load(edges + samples + sample)
        room = tl.load(rooms + samples + sample)
        each = tl.exp(0.0 - edge.to(tl.float32, bitcast=True))
        chunk = tl.arange(0, CHUNKS_P)
        there = chunk < CHUNKS
        tied = tl.load(ties + sample * CHUNKS + chunk, mask=there, other=0)
        before = tl.cumsum(tied, 0) - tied
        taken = tl.minimum(tl.maximum(room - before, 0.0), tied)
        mass = tl.load(masses + sample * CHUNKS + chunk, mask=there, other=0)
        mass += tl.where(taken > 0, taken * each, 0.0)
        upto = tl.cumsum(mass, 0)
        uniform = tl.load(uniforms + sample).to(tl.float32, bitcast=True)
        goal = uniform * tl.sum(mass, 0)
        passed = (upto <= goal) & there
        at_chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), CHUNKS - 1)
        below = tl.sum(tl.where(chunk < at_chunk, mass, 0.0), 0)
        left = room - tl.sum(tl.where(chunk == at_chunk, before, 0.0), 0)
        at = at_chunk * CHUNK + tl.arange(0, CHUNK)
        key, alone = _keys(changed, sample, at, peak, heat, V)
        likely = (alone >= min_p) & (at < V)
        tie = (likely & (key == edge)).to(tl.float32)
        kept = likely & ((key < edge) | ((tie > 0) & (tl.cumsum(tie, 0) <= left)))
        inner = tl.cumsum(tl.where(kept, alone, 0.0), 0)
        short = (below + inner <= goal) & (at < V)
        token = at_chunk * CHUNK + tl.sum(short.to(tl.int32), 0)
        token = tl.minimum(token, V - 1)
    tl.store(tokens + sample, token)
    tl.store(last + slot, token)
