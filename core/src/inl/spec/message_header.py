"""Header of the int32 frames of :mod:`inl.spec.message`."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from inl.errors import ProtocolError
from inl.spec.step import MAX_STOP_IDS, SAMPLERS, Bucket

INT32 = "<i4" if sys.byteorder == "little" else ">i4"
"""NumPy's string for the dtype of a frame."""

VERSION = 0x494E4C03
"""First word of every frame."""

HEADER = 16
"""Words of a header; those after the fields of :class:`Header` are reserved (0)."""

STEP, ADMIT, RELEASE, TOKEN_BIAS, READ, WRITE = range(6)
"""Kinds of frames."""

STEP_NUMBERS = 1 << 31
"""Step numbers in frames are taken modulo this; at 1 ms a step, that is 25 days."""

MASKED = 1
"""Flag of a step: the runner waits for ``sample`` before it samples tokens."""

EMBEDDED = 2
"""Flag of a step: embeddings follow its tokens, see :mod:`inl.spec.embedded_rows`."""

HALVED = 16
"""Flag of a step with ``EMBEDDED``: the embeddings are in bfloat16."""

POOLED = 4
"""Flag of a step: nothing is sampled, and the reply has the hidden states of the rows'
last tokens. Without other flags and decoding rows, and with one token per row."""

SCORED = 8
"""Flag of a step: nothing is sampled, and the reply has the scores of the token after
each one that it computes, of a "sample_filtered" bucket. As ``POOLED`` otherwise."""


FLAGS = MASKED | EMBEDDED | POOLED | SCORED | HALVED
"""All flags. A runner refuses a step with another one, which it does not know."""


class Header(NamedTuple):
    """The first words of a frame. Only steps use the words after ``kind``."""

    version: int
    kind: int
    step: int
    tokens: int
    rows: int
    tokens_per_row: int
    sampler: int
    """Index into :data:`~inl.spec.step.SAMPLERS`."""
    flags: int
    repeat: int
    """``Bucket.repeat``; 0 for a single step."""
    decode_rows: int
    used_rows: int
    used_tokens: int
    used_updates: int
    stop_ids: int = 0
    """``Bucket.stop_ids`` of a repeated step; 0 for its default."""
    uniforms: int = 0
    """``Bucket.uniforms``."""

    @property
    def bucket(self) -> Bucket:
        """The compiled program that the step is for."""
        return Bucket(
            tokens=self.tokens,
            rows=self.rows,
            tokens_per_row=self.tokens_per_row,
            sampler=SAMPLERS[self.sampler],
            repeat=max(self.repeat, 1),
            stop_ids=self.stop_ids or MAX_STOP_IDS,
            uniforms=self.uniforms,
        )


HEADER_WORD = Header(*range(len(Header._fields)))
"""Word of each header field, from the start of a frame."""

USED_COUNTS = slice(HEADER_WORD.decode_rows, HEADER_WORD.used_tokens + 1)
"""Words of ``Step.used_counts``: decoding rows, rows and tokens in use."""


def header(frame: Any) -> Header:
    """Read and check the first words of a frame; raises :class:`ProtocolError`."""
    if frame.ndim != 1 or frame.shape[0] < HEADER or frame.dtype.str != INT32:
        raise ProtocolError(
            f"frame: found {frame.dtype} {list(frame.shape)}, "
            f"expected int32 [words] of at least {HEADER}"
        )
    words = frame[:HEADER].tolist()
    head = Header(*words[: len(Header._fields)])
    if head.version != VERSION:
        raise _error("version", f"{head.version:#x}", f"{VERSION:#x}")
    if not STEP <= head.kind <= WRITE:
        raise _error("kind", head.kind, f"{STEP} to {WRITE}")
    if head.kind == STEP:
        _check_step(head)
        if head.flags & ~FLAGS:
            raise _error("flags", head.flags, f"sums of those in {FLAGS}")
    if any(words[len(Header._fields) :]):
        raise ProtocolError(
            "frame: found a reserved word of the header that is not 0: it asks for "
            "something that this version does not know"
        )
    return head


def _check_step(head: Header) -> None:
    valid = (
        0 <= head.sampler < len(SAMPLERS)
        and (not head.repeat or _repeats(head))
        and (not head.flags & (POOLED | SCORED) or _samples_nothing(head))
        and min(head.tokens, head.rows, head.tokens_per_row) >= 1
        and 0 <= head.decode_rows <= head.used_rows <= head.rows
        and 0 <= head.used_tokens <= head.tokens
        and head.used_updates >= 0
        and (not head.stop_ids or (head.stop_ids > 0 and head.repeat > 1))
        and (not head.uniforms or _has_uniforms(head))
    )
    if not valid:
        raise _step_error(head)


def _repeats(head: Header) -> bool:
    """Whether a step may be repeated: all of its rows are decoding rows."""
    return (
        head.repeat > 1
        and head.tokens == head.rows
        and head.tokens_per_row == 1
        and head.decode_rows == head.used_rows == head.used_tokens
        and not head.flags
    )


def _samples_nothing(head: Header) -> bool:
    """Whether a step may return hidden states, or scores of its own tokens."""
    single = head.tokens_per_row == 1 and not head.repeat
    filtered = head.sampler == SAMPLERS.index("sample_filtered")
    alone = head.flags == POOLED or (head.flags == SCORED and filtered)
    return alone and single and not head.decode_rows


def _has_uniforms(head: Header) -> bool:
    """Whether a step may have a number of uniforms of its own: it verifies drafts."""
    least = 2 * head.tokens_per_row - 1
    return head.tokens_per_row > 1 and head.uniforms >= least


def _step_error(head: Header) -> ProtocolError:
    """Return an error that names the first invalid word."""
    for name, least in _LEAST.items():
        if (value := getattr(head, name)) < least:
            return _error(name, value, f"{least} and more")
    for name, most in _MOST.items():
        value, limit = getattr(head, name), getattr(head, most)
        if value > limit:
            return _error(name, value, f"up to {limit}, the header's {most}")
    if head.repeat and not _repeats(head):
        accepted = "0, or 2 and more with one token per row, decoding, without flags"
        return _error("repeat", head.repeat, accepted)
    if head.flags & (POOLED | SCORED) and not _samples_nothing(head):
        accepted = (
            f"{POOLED}, or {SCORED} of a sample_filtered step, alone, with one token "
            "per row and no decoding rows"
        )
        return _error("flags", head.flags, accepted)
    if head.stop_ids and not (head.stop_ids > 0 and head.repeat > 1):
        accepted = "0, or 1 and more in a repeated step"
        return _error("stop_ids", head.stop_ids, accepted)
    if head.uniforms and not _has_uniforms(head):
        accepted = "0, or 2 * W - 1 and more with W tokens per row, above 1"
        return _error("uniforms", head.uniforms, accepted)
    names = ", ".join(SAMPLERS)
    return _error("sampler", head.sampler, f"0 to {len(SAMPLERS) - 1} ({names})")


_LEAST = {
    "tokens": 1, "rows": 1, "tokens_per_row": 1, "decode_rows": 0, "used_rows": 0,
    "used_tokens": 0, "used_updates": 0,
}  # fmt: skip
_MOST = {"decode_rows": "used_rows", "used_rows": "rows", "used_tokens": "tokens"}


def _error(name: str, value: object, accepted: str) -> ProtocolError:
    word = getattr(HEADER_WORD, name)
    return ProtocolError(
        f"frame word {word} ({name}): found {value}, accepts {accepted}"
    )
