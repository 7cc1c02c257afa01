"""One step of a model: its bucket, its arrays, the per-slot tables, and its scores.

A tensor is opaque (``Array``): NumPy, torch, JAX or a
:class:`~inl.spec.strict_array.StrictArray`. Every tuple is a ``NamedTuple``, so each
framework sees a tree of arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""An opaque tensor: ``+ - *``, ``.shape``, ``.dtype``, static slices and reshapes."""

SAMPLERS = ("greedy", "sample", "sample_filtered")
"""Ways to choose a token, by rising cost; a bucket is compiled for one."""

PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Columns of ``Tables.params``; "greedy" reads none, "sample" the first."""

NEUTRAL = (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
"""Values of :data:`PARAMS` that change nothing."""

TOP = 20
"""Likeliest tokens whose log-probabilities a "sample_filtered" step reports."""


class Bucket(NamedTuple):
    """Static shape of a compiled step. Hashable; the only compile key."""

    tokens: int
    """T: tokens computed in the step, padding included."""
    rows: int
    """R: sequences taking part, padding included."""
    tokens_per_row: int = 1
    """W: tokens sampled per row; 1, or k + 1 when k drafts are verified."""
    sampler: str = "greedy"
    """One of :data:`SAMPLERS`."""


class Step(NamedTuple):
    """What one step computes: int32 arrays on the device.

    Decoding rows come first. Slot 0, block 0 and cell 0 belong to nobody: padding
    reads and writes there. ``G`` cache groups, ``B`` blocks per sequence,
    ``S = R * W`` samples.
    """

    tokens: Array
    """[T] token ids."""
    positions: Array
    """[T] place of the token in its own sequence."""
    rows: Array
    """[T] row of the token."""
    starts: Array
    """[R + 1] row r owns tokens starts[r] .. starts[r + 1]."""
    lengths: Array
    """[R] tokens cached after this step; 0 for padding."""
    slots: Array
    """[R] home of the row in per-sequence state."""
    blocks: Array
    """[G, R, B] block table of each cache group."""
    writes: Array
    """[G, T] cell (block * block_size + offset) for the token's key and value."""
    samples: Array
    """[S] tokens whose hidden state becomes logits."""
    adapters: Array
    """[R] adapter of the row; 0 is none."""
    used_counts: Array
    """[3] decoding rows, rows, tokens in use."""
    uniforms: Array
    """[S] the host's uniform numbers, float32 bits held as int32."""
    plan: Any = ()
    """What the attention kernel worked out once for all layers; opaque."""


class Tables(NamedTuple):
    """Per-slot bookkeeping that lives at the runner, int32 unless said otherwise."""

    blocks: Array
    """[G, slots, B] block tables."""
    lengths: Array
    """[slots] tokens cached."""
    last: Array
    """[slots] last token chosen."""
    adapters: Array
    """[slots] adapter; 0 is none."""
    params: Array
    """[slots, len(PARAMS)] float32 sampling parameters."""
    token_counts: Array
    """[slots, V] twice the times that the answer holds a token, plus 1 where the prompt
    does; [slots, 0] where no "sample_filtered" program is served."""
    bias: Array
    """[slots, V] or [slots, 0], float32: added to the logits."""


class Scores(NamedTuple):
    """Log-probabilities of a step's choices; N = min(TOP, V)."""

    chosen: Array
    """[S] float32, of the chosen tokens."""
    ids: Array
    """[S, N] the likeliest tokens, likeliest first."""
    values: Array
    """[S, N] float32, theirs."""
