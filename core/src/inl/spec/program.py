"""Description of a program that a backend is asked to compile."""

from __future__ import annotations

from typing import NamedTuple

from inl.spec.limits import Limits
from inl.spec.step import Bucket

PROGRAMS = {
    "advance": "(weights, message, state) -> (tokens, state)",
    "repeat": "(weights, message, state) -> (tokens, state)",
    "logits": "(weights, message, state) -> (logits, step, state)",
    "advance_embedded": "(weights, message, embedded, state) -> (tokens, state)",
    "logits_embedded": "(weights, message, embedded, state) -> (logits, step, state)",
    "pool": "(weights, message, state) -> (hidden, state)",
    "score": "(weights, message, state) -> (scores, state)",
    "encode": "(weights, sequences) -> (results,)",
    "encode_part": "(weights, sequences, arrays) -> (row, arrays)",
    "masked": "(logits, masks, step, state) -> (tokens, state)",
    "draft": "(weights, message, hidden, state) -> (tokens, hidden, state)",
    "admit": "(messages, state) -> (state,)",
    "set_token_bias": "(message, state) -> (state,)",
    "read_blocks": "(blocks, state) -> (contents,)",
    "write_blocks": "(blocks, contents, state) -> (state,)",
    "read_slot": "(row, state) -> (contents,)",
    "write_slot": "(row, contents, state) -> (state,)",
}
"""Name -> signature of each program. "advance" computes a step and samples; "repeat"
does so several times, see :class:`~inl.backend.provisional.DeviceLoops`; "logits" and
"masked" do so in two calls, for steps whose allowed tokens the host computes in
between; the
"embedded" ones are those of steps with embeddings in place of some tokens; "pool"
computes the hidden states [R, H] of the rows' last tokens, which a head multiplies by
the vocabulary; "score" computes the :class:`~inl.spec.step.Scores` of given tokens,
one after each token of the step, whose message :func:`inl.spec.scored_tokens.with_next`
has extended; "encode" computes the results [N, K] of an
:class:`~inl.spec.encoder.Encoder` for a :class:`~inl.spec.encoder.SequenceBatch` of any
shape (its bucket is ``None``) and consumes nothing; "encode_part" computes a part of it
(:func:`~inl.spec.encoder.encode_part`) likewise, so that steps run between parts;
"draft" computes a step of a draft
head from hidden states, of any shapes (its bucket is ``None``); "admit" applies
admissions and releases, int32 [n, words]; those of blocks and slots copy contents of
the cache, see :mod:`inl.backend.block_io`, and consume the state only if they return
it. The programs that compute a model with taps, for a draft head, return the hidden
states [T, taps * H] before the state."""


class ProgramInfo(NamedTuple):
    """Description of a function that a backend compiles."""

    name: str
    """One of :data:`PROGRAMS`."""
    limits: Limits
    """Capacity of the runner: slots, blocks, block size, vocabulary, buckets."""
    bucket: Bucket | None
    """Shape of the step; ``None`` for the programs that run between steps."""
    consumes: tuple[int, ...]
    """Positions of the arguments whose buffers the program may overwrite."""
    context: int
    """Tokens of the longest sequence that the program serves: it reads block tables of
    ``context / limits.block_size`` columns. Less than the table holds only if the
    backend offers :class:`~inl.backend.base.ContextLengths`."""
