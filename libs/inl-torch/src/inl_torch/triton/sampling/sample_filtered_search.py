"""Triton kernel of one pass of the search for the threshold of a filter."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.step import PARAMS
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.sampling.reductions import global_top

BITS = tl.constexpr(4)
BINS = tl.constexpr(16)
"""Bins of a window."""

FIRST_WINDOW_BITS = tl.constexpr(31)
"""Bits of the first window; the sign bit of a key is never set."""

COARSE_BITS = tl.constexpr(28)
FINE_BITS = tl.constexpr(22)
FINE_START = tl.constexpr(254)
"""The first window has eight bins of 28 bits, and, for differences from 1 (key >> 22 is
254) to 16, which include most thresholds, eight bins of 22 bits."""

ALL_KEYS = tl.constexpr(0x7FFFFFFF)
"""Threshold above every key, which keeps all tokens."""

LANES = tl.constexpr(128)
"""Threads of a program, each of which has a separate accumulator."""

TOP_K = tl.constexpr(PARAMS.index("top_k"))
TOP_P = tl.constexpr(PARAMS.index("top_p"))


@triton.jit
def next_chunk(
    selected: tensor, chunk: tensor, at: tensor, CHUNKS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the first selected chunk after ``at``, or ``CHUNKS``."""
    return tl.min(tl.where(selected & (chunk > at), chunk, CHUNKS), 0)


@triton.jit
def load_logits(
    logits: tensor, penalized: tensor, changed: tensor, sample: tensor, chunk: tensor,
    stride: tensor, V: tensor, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load the penalized logits of a chunk; -inf past the last chunk.

    changed: [S, CHUNKS], whether they differ from ``logits`` and are in ``penalized``.
    """
    cell = changed + sample * CHUNKS + chunk
    is_changed = tl.load(cell, mask=chunk < CHUNKS, other=0) > 0
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    # One of the two reads nothing.
    end, other_end = tl.where(is_changed, 0, V), tl.where(is_changed, V, 0)
    x = tl.load(logits + sample * stride + at, mask=at < end, other=float("-inf"))
    other = tl.load(
        penalized + sample * V + at, mask=at < other_end, other=float("-inf")
    )
    return tl.where(is_changed, other, x.to(tl.float32))


@triton.jit
def to_keys(
    x: tensor, top_logit: tensor, temperature: tensor,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the integer keys of logits, which grow with the distance from the top
    logit, and their unnormalized probabilities.
    """
    scaled = (x - top_logit) / temperature
    return (0.0 - scaled).to(tl.int32, bitcast=True), tl.exp(scaled)


@triton.jit
def group_chunks(
    CHUNKS: tl.constexpr, CHUNKS_PER_GROUP: tl.constexpr,
    CHUNKS_PER_GROUP_P: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the chunks of this program's group, and whether each is valid."""
    index = tl.arange(0, CHUNKS_PER_GROUP_P)
    chunk = tl.program_id(1) * CHUNKS_PER_GROUP + index
    return chunk, (index < CHUNKS_PER_GROUP) & (chunk < CHUNKS)


@triton.jit
def chunk_top_keys(
    top_logits: tensor, sample: tensor, chunk: tensor, valid: tensor, top_logit: tensor,
    temperature: tensor, CHUNKS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return the smallest key of each chunk and its probability, from its top logit."""
    top = tl.load(top_logits + sample * CHUNKS + chunk, mask=valid, other=0)
    min_key, mass = to_keys(top, top_logit, temperature)
    return min_key, mass


@triton.jit
def _bitwise_or(a: tensor, b: tensor) -> tensor:
    return a | b


@triton.jit
def _bin_of(key: tensor) -> tensor:
    """Return the bin of a key in the first window."""
    fine = key >> FINE_BITS
    inner = fine - FINE_START + 4
    coarse = key >> COARSE_BITS
    return tl.where(
        fine < FINE_START, coarse, tl.where(inner < 12, inner, coarse + 8)
    )  # fmt: skip


@triton.jit
def _bin_start(bin_index: tensor) -> tensor:
    """Return the smallest key of a bin of the first window."""
    inner = (tl.minimum(bin_index, 12) - 4 + FINE_START) << FINE_BITS
    outer = (
        tl.where(bin_index < 4, bin_index, tl.maximum(bin_index - 8, 0)) << COARSE_BITS
    )
    return tl.where(bin_index < 4, outer, tl.maximum(inner, outer))


@triton.jit
def _bin_totals(
    partials: tensor, sample: tensor, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """Sum the partial results of all groups for each bin of the previous pass."""
    bin_index = tl.arange(0, BINS)[:, None]
    group = tl.arange(0, GROUPS_P)[None, :]
    pointers = (sample * BINS + bin_index) * GROUPS + group
    return tl.sum(tl.load(partials + pointers, mask=group < GROUPS, other=0), 1)


@triton.jit
def find_bin(
    partials: tensor, windows: tensor, below: tensor, sample: tensor, target: tensor,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
) -> tuple[tensor, tensor, tensor, tensor]:  # fmt: skip
    """Find the bin that reaches the target: its index, smallest key, bits, weight
    below.

    A window of 0 bits is a single key, and the search is complete. Some bins have fewer
    keys than their bits suggest: keys counted beyond the window follow all keys in it.
    """
    window_start = tl.load(windows + sample * 2)
    window_bits = tl.load(windows + sample * 2 + 1)
    below_weight = tl.load(below + sample)
    found_bin = 0
    if window_bits > 0:
        cumulative = below_weight + tl.cumsum(
            _bin_totals(partials, sample, GROUPS, GROUPS_P), 0
        )
        found_bin = tl.minimum(tl.sum((cumulative < target).to(tl.int32), 0), BINS - 1)
        previous = tl.arange(0, BINS) == found_bin - 1
        below_bin = tl.sum(tl.where(previous, cumulative, 0.0), 0)
        below_weight = tl.where(found_bin > 0, below_bin, below_weight)
        if window_bits == FIRST_WINDOW_BITS:
            window_start = _bin_start(found_bin)
            window_bits = tl.where(
                (found_bin >= 4) & (found_bin < 12), FINE_BITS, COARSE_BITS
            )
        else:
            window_bits = tl.maximum(window_bits - BITS, 0)
            window_start += found_bin << window_bits
    return found_bin, window_start, window_bits, below_weight


@triton.jit
def _mass_target(
    partials: tensor, windows: tensor, thresholds: tensor, tie_quotas: tensor,
    targets: tensor, top_p: tensor, sample: tensor, GROUPS: tl.constexpr,
    GROUPS_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return the target mass of top-p: its share of the mass that passes top-k."""
    target = tl.load(targets + sample)
    if tl.load(windows + sample * 2 + 1) == FIRST_WINDOW_BITS:
        total = tl.sum(_bin_totals(partials, sample, GROUPS, GROUPS_P), 0)
        tie_mass = tl.exp(
            0.0 - tl.load(thresholds + sample).to(tl.float32, bitcast=True)
        )
        # With fewer than k tokens, no token is at the threshold.
        ties = tl.where(tie_mass > 0, tie_mass * tl.load(tie_quotas + sample), 0.0)
        target = top_p * (total + ties)
    return target


@triton.jit
def _bin_weights(
    logits: tensor, penalized: tensor, changed: tensor, sample: tensor, chunk: tensor,
    selected: tensor, top_logit: tensor, temperature: tensor, threshold: tensor,
    window_start: tensor, window_bits: tensor, stride: tensor, V: tensor,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS_PER_GROUP_P: tl.constexpr, FIRST: tl.constexpr, BY_MASS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Sum the selected chunks by bin; return a bit mask of non-empty bins per chunk
    too.
    """
    # Logits that a thread loads at a time, which stay its own.
    WIDTH: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
    shift = tl.maximum(window_bits - BITS, 0)
    bins = tl.arange(0, BINS)
    weights = tl.zeros([BINS, LANES], tl.float32)
    occupied = tl.zeros([CHUNKS_PER_GROUP_P], tl.int32)
    at = next_chunk(selected, chunk, -1, CHUNKS)
    x = load_logits(
        logits, penalized, changed, sample, at, stride, V, CHUNKS, CHUNK
    )  # fmt: skip
    while at < CHUNKS:
        # Prefetches the next chunk while this one is summed.
        next_at = next_chunk(selected, chunk, at, CHUNKS)
        prefetched = load_logits(
            logits, penalized, changed, sample, next_at, stride, V, CHUNKS, CHUNK
        )  # fmt: skip
        key, mass = to_keys(x, top_logit, temperature)
        bin_index = _bin_of(key) if FIRST else (key - window_start) >> shift
        inside = (at * CHUNK + tl.arange(0, CHUNK) < V) & (key < threshold)
        inside = inside & (bin_index >= 0) & (bin_index < BINS)
        bin_index = tl.where(inside, bin_index, BINS)
        bit = tl.reduce(1 << bin_index, 0, _bitwise_or)
        occupied = tl.where(chunk == at, bit, occupied)
        bin_index = tl.reshape(bin_index, (1, CHUNK // (WIDTH * LANES), LANES, WIDTH))
        in_bin = bin_index == bins[:, None, None, None]
        if BY_MASS:
            mass = tl.reshape(mass, (1, CHUNK // (WIDTH * LANES), LANES, WIDTH))
            weights += tl.sum(tl.sum(tl.where(in_bin, mass, 0.0), 3), 1)
        else:
            weights += tl.sum(tl.sum(in_bin.to(tl.float32), 3), 1)
        at, x = next_at, prefetched
    return weights, occupied


@triton.jit
def search_pass(
    logits: tensor, penalized: tensor, changed: tensor, top_logits: tensor,
    top_ids: tensor, param_table: tensor, slots: tensor, is_sampled: tensor,
    targets: tensor, thresholds: tensor, tie_quotas: tensor, partials: tensor,
    windows: tensor, below: tensor, occupancy: tensor, new_partials: tensor,
    new_windows: tensor, new_below: tensor, new_occupancy: tensor, stride: tensor,
    V: tensor, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS_PER_GROUP: tl.constexpr,
    CHUNKS_PER_GROUP_P: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
    FIRST: tl.constexpr, BY_MASS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One pass of a search: sum counts or masses of a group of chunks by bin.

    Read from the previous pass, and written by this one: partials [S, BINS, GROUPS];
    windows [S, 2], the smallest key and the number of bits; below [S], the weight of
    smaller keys; occupancy [S, CHUNKS], a bit for each bin in which a chunk has a key.
    The first pass by mass follows the last pass by count, and stores the thresholds of
    top-k, [S] (largest key that is kept), and tie_quotas [S] (how many tokens with
    that key are kept).
    """
    pdl_sync(PDL)
    sample = tl.program_id(0).to(tl.int64)
    if tl.load(is_sampled + sample) > 0:
        return
    is_first = tl.program_id(1) == 0
    row_params = param_table + tl.load(slots + sample).to(tl.int64) * COLUMNS
    temperature, top_k, top_p = (
        tl.load(row_params),
        tl.load(row_params + TOP_K),
        tl.load(row_params + TOP_P),
    )
    # The first pass by mass also stores the threshold of rows without top-p.
    if ((top_p >= 1) & (not FIRST)) if BY_MASS else (top_k < 1):
        return
    top_logit, _ = global_top(top_logits, top_ids, sample, CHUNKS, CHUNKS_P)
    threshold, target = ALL_KEYS, top_k
    if BY_MASS:
        if FIRST:
            tie_quota = float("inf")
            if top_k >= 1:
                _, threshold, _, below_count = find_bin(
                    partials, windows, below, sample, top_k, GROUPS, GROUPS_P
                )  # fmt: skip
                tie_quota = top_k - below_count
            if is_first:
                tl.store(thresholds + sample, threshold)
                tl.store(tie_quotas + sample, tie_quota)
        else:
            threshold = tl.load(thresholds + sample)
    if (top_p >= 1) & BY_MASS:
        return
    chunk, valid = group_chunks(CHUNKS, CHUNKS_PER_GROUP, CHUNKS_PER_GROUP_P)
    window_start, window_bits, below_weight = 0, FIRST_WINDOW_BITS, 0.0
    if FIRST:
        min_key, _ = chunk_top_keys(
            top_logits, sample, chunk, valid, top_logit, temperature, CHUNKS
        )
        selected = valid & (min_key < threshold)
    else:
        if BY_MASS:
            target = _mass_target(
                partials, windows, thresholds, tie_quotas, targets, top_p, sample,
                GROUPS, GROUPS_P,
            )  # fmt: skip
            if is_first:
                tl.store(targets + sample, target)
        found_bin, window_start, window_bits, below_weight = find_bin(
            partials, windows, below, sample, target, GROUPS, GROUPS_P
        )  # fmt: skip
        occupied = tl.load(occupancy + sample * CHUNKS + chunk, mask=valid, other=0)
        selected = ((occupied >> found_bin) & 1) > 0
    if is_first:
        tl.store(new_windows + sample * 2, window_start)
        tl.store(new_windows + sample * 2 + 1, window_bits)
        tl.store(new_below + sample, below_weight)
    if window_bits == 0:
        return
    weights, occupied = _bin_weights(
        logits, penalized, changed, sample, chunk, selected, top_logit, temperature,
        threshold, window_start, window_bits, stride, V, CHUNKS, CHUNK,
        CHUNKS_PER_GROUP_P, FIRST, BY_MASS,
    )  # fmt: skip
    tl.store(new_occupancy + sample * CHUNKS + chunk, occupied, mask=valid)
    pointers = (sample * BINS + tl.arange(0, BINS)) * GROUPS + tl.program_id(1)
    tl.store(new_partials + pointers, tl.sum(weights, 1))
