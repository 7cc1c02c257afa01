"""The programs behind :mod:`inl_torch.triton.sampling.sample_filtered`, but for the search."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.step import PARAMS
from inl_torch.triton.pdl import follow
from inl_torch.triton.sampling.reductions import best, drawn_chunk, drawn_id, peak_of
from inl_torch.triton.sampling.sample_filtered_search import (
    TOP_P,
    decide,
    following,
    keys_of,
    logits_of,
    nearest,
    own_chunks,
)

MIN_P = tl.constexpr(PARAMS.index("min_p"))
REPEATED = tl.constexpr(PARAMS.index("repetition_penalty"))
PRESENT = tl.constexpr(PARAMS.index("presence_penalty"))
FREQUENT = tl.constexpr(PARAMS.index("frequency_penalty"))


@triton.jit
def penalize(
    logits: tensor, fed: tensor, starts: tensor, used: tensor, counts: tensor,
    bias: tensor, settings: tensor, slots: tensor, changed: tensor, peaks: tensor,
    ids: tensor, T: tensor, stride: tensor, V: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """A chunk's logits after penalties and bias, and the highest of them.

    The token that a decoding row was fed is counted by the program whose chunk has it.
    """
    follow(EARLY)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    mine = settings + slot * COLUMNS
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits + sample * stride + at, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    factor = tl.load(mine + REPEATED)
    factor = tl.where(factor > 0, factor, 1.0)
    present, frequent = tl.load(mine + PRESENT), tl.load(mine + FREQUENT)
    penalized = (factor != 1) | (present != 0) | (frequent != 0)
    token = tl.load(fed + tl.minimum(tl.load(starts + sample), T - 1))
    newest = at == tl.where(sample < tl.load(used), token, -1)
    cells = counts + slot * V + at
    read = at < tl.where(penalized, V, 0)
    count = tl.load(cells, mask=read | newest, other=0)
    count += 2 * newest.to(tl.int32)
    tl.store(cells, count, mask=newest)
    factor = tl.where(count > 0, factor, 1.0)
    x = tl.where(x > 0, x / factor, x * factor)
    answered = count >> 1
    x = x - frequent * answered.to(tl.float32)
    x = x - present * (answered > 0).to(tl.float32)
    x += tl.load(bias + slot * V + at, mask=inside, other=0)
    tl.store(changed + sample * V + at, x, mask=inside)
    peak, found = peak_of(x, at, V)
    tl.store(peaks + sample * CHUNKS + tl.program_id(1), peak)
    tl.store(ids + sample * CHUNKS + tl.program_id(1), found)


@triton.jit
def keep(
    changed: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    goals: tensor, edges: tensor, rooms: tensor, table: tensor, windows: tensor,
    below: tensor, masses: tensor, ties: tensor, V: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    PIECES: tl.constexpr, PIECES_P: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_P: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The mass of each chunk's kept tokens, but of the edge's key their number.

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
        _, bound, _, lighter = decide(
            table, windows, below, sample, goal, GROUPS, GROUPS_P
        )  # fmt: skip
        # What top-k keeps of its edge's key was not weighed, and may hold the goal.
        bound = tl.minimum(bound, edge)
        each = tl.exp(0.0 - bound.to(tl.float32, bitcast=True))
        few = tl.maximum(tl.ceil((goal - lighter) / each), 1.0)
        room = tl.where(bound < edge, few, tl.minimum(room, few))
        edge = bound
    if tl.program_id(1) == 0:
        tl.store(edges + samples + sample, edge)
        tl.store(rooms + samples + sample, room)
    peak, _ = best(peaks, ids, sample, CHUNKS, CHUNKS_P)
    chunk, there = own_chunks(CHUNKS, PIECES, PIECES_P)
    least, most = nearest(peaks, sample, chunk, there, peak, heat, CHUNKS)
    chosen = there & (least <= edge) & (most >= min_p)
    sums, tied = tl.zeros([PIECES_P], tl.float32), tl.zeros([PIECES_P], tl.float32)
    at = following(chosen, chunk, -1, CHUNKS)
    x = logits_of(changed, sample, at, V, CHUNK)
    while at < CHUNKS:
        # The next chunk is on its way while this one is added up.
        after = following(chosen, chunk, at, CHUNKS)
        ahead = logits_of(changed, sample, after, V, CHUNK)
        key, mass = keys_of(x, peak, heat)
        likely = (at * CHUNK + tl.arange(0, CHUNK) < V) & (mass >= min_p)
        kept = tl.sum(tl.where(likely & (key < edge), mass, 0.0), 0)
        equal = tl.sum((likely & (key == edge)).to(tl.float32), 0)
        sums = tl.where(chunk == at, kept, sums)
        tied = tl.where(chunk == at, equal, tied)
        at, x = after, ahead
    tl.store(masses + sample * CHUNKS + chunk, sums, mask=there)
    tl.store(ties + sample * CHUNKS + chunk, tied, mask=there)


@triton.jit
def draw(
    changed: tensor, peaks: tensor, ids: tensor, settings: tensor, slots: tensor,
    edges: tensor, rooms: tensor, masses: tensor, ties: tensor, uniforms: tensor,
    tokens: tensor, last: tensor, V: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Decide on one sample's token, as :func:`inl_torch.triton.sampling.sample._pick` does."""
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
        uniform = tl.load(uniforms + sample).to(tl.float32, bitcast=True)
        at_chunk, goal, below, total = drawn_chunk(mass, uniform, chunk)
        left = room - tl.sum(tl.where(chunk == at_chunk, before, 0.0), 0)
        at = at_chunk * CHUNK + tl.arange(0, CHUNK)
        x = logits_of(changed, sample, at_chunk, V, CHUNK)
        key, alone = keys_of(x, peak, heat)
        likely = (alone >= min_p) & (at < V)
        tie = (likely & (key == edge)).to(tl.float32)
        kept = likely & ((key < edge) | ((tie > 0) & (tl.cumsum(tie, 0) <= left)))
        found = drawn_id(tl.where(kept, alone, 0.0), at, goal, below)
        token = tl.where(total > 0, found, token)
    tl.store(tokens + sample, token)
    tl.store(last + slot, token)
