"""Layout of the int32 frames of :mod:`inl.spec.message`: header, records, positions.

Writers and parsers index frames with the ``*_WORD`` constants and with :func:`layout`.
Each constant is the record's own tuple with a field's position as its value, so
``HEADER_WORD.step`` is the index of the header word that holds the step number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import ProtocolError
from inl.spec.step import PARAMS, SAMPLERS, Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int32]

INT32 = "<i4" if sys.byteorder == "little" else ">i4"
"""NumPy's string for the dtype of a frame."""

VERSION = 0x494E4C02
"""First word of every frame."""

HEADER = 16
"""Words of a header; those after the fields of :class:`Header` are reserved (0)."""

STEP, ADMIT, RELEASE, TOKEN_BIAS = 0, 1, 2, 3
"""Kinds of frames."""

MAX_TOKEN_BIASES = 256
"""Most tokens in one token bias frame."""

MASKED = 1
"""Flag of a step: the runner waits for ``sample`` before it samples tokens."""


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
    reserved: int
    """Must be 0."""
    decode_rows: int
    used_rows: int
    used_tokens: int
    used_updates: int

    @property
    def bucket(self) -> Bucket:
        """The compiled program that the step is for."""
        return Bucket(
            self.tokens, self.rows, self.tokens_per_row, SAMPLERS[self.sampler]
        )


class Row(NamedTuple):
    """One sequence's part of a step, as a writer receives it."""

    slot: int
    tokens: Sequence[int] | IntArray
    """Ids to compute; -1 is the slot's last sampled token."""
    uniforms: Sequence[float] = ()
    """In [0, 1), one per sampled position; missing ones are 0."""


FEEDBACK = (-1,)
"""Tokens of a decoding row: the token that the runner sampled last."""


class RowWords(NamedTuple):
    """One row of a step frame, 2 + W words."""

    slot: int
    token_count: int
    """Tokens of the row; 0 is padding."""
    uniforms: int
    """Float32 bits of the first of W uniform numbers."""


class BlockTableUpdate(NamedTuple):
    """One changed entry of a block table."""

    group: int
    slot: int
    entry: int
    """Index into the slot's table."""
    block: int


class AdmissionWords(NamedTuple):
    """Body of an admission. A release has only the slot, and zeros elsewhere."""

    slot: int
    length: int
    """Tokens whose keys and values are already in the given blocks."""
    last: int
    """The token that -1 stands for in the first step."""
    adapter: int
    params: int
    """Float32 bits of the first of :data:`~inl.spec.step.PARAMS`."""
    blocks: int
    """First word of the block table [G, B]."""


class TokenBiasWords(NamedTuple):
    """Body of a token bias frame."""

    slot: int
    used: int
    """Entries in use."""
    entries: int
    """First word of :data:`MAX_TOKEN_BIASES` entries."""


class BiasWords(NamedTuple):
    """One entry of a token bias frame."""

    token: int
    token_count: int
    bias: int
    """Float32 bits."""


class TokenBias(NamedTuple):
    """Occurrences and logit bias of one token of a sequence."""

    token: int
    token_count: int = 0
    """Twice the occurrences in the answer, plus 1 if the token is in the prompt."""
    bias: float = 0.0
    """Added to the token's logit."""


HEADER_WORD = Header(*range(len(Header._fields)))
"""Word of each header field, from the start of a frame."""

USED_COUNTS = slice(HEADER_WORD.decode_rows, HEADER_WORD.used_tokens + 1)
"""Words of ``Step.used_counts``: decoding rows, rows and tokens in use."""

ROW_WORD = RowWords(*range(len(RowWords._fields)))
"""Word of each field within a row of a step frame."""

UPDATE_WORD = BlockTableUpdate(*range(len(BlockTableUpdate._fields)))
"""Word of each field within a block table update."""

UPDATE_WORDS = len(UPDATE_WORD)
"""Words of a block table update."""

ADMISSION_WORD = AdmissionWords(
    slot=HEADER,
    length=HEADER + 1,
    last=HEADER + 2,
    adapter=HEADER + 3,
    params=HEADER + 4,
    blocks=HEADER + 4 + len(PARAMS),
)
"""Word of each field from the start of an admission or a release."""

TOKEN_BIAS_WORD = TokenBiasWords(*range(HEADER, HEADER + len(TokenBiasWords._fields)))
"""Word of each field from the start of a token bias frame."""

BIAS_WORD = BiasWords(*range(len(BiasWords._fields)))
"""Word of each field within an entry of a token bias frame."""

BIAS_WORDS = len(BIAS_WORD)
"""Words of an entry of a token bias frame."""

TOKEN_BIAS_SIZE = TOKEN_BIAS_WORD.entries + BIAS_WORDS * MAX_TOKEN_BIASES
"""Words of a token bias frame."""


class Layout(NamedTuple):
    """Start of each part of a step frame, in words."""

    rows: int
    updates: int
    tokens: int
    size: int

    @property
    def max_updates(self) -> int:
        """Block table updates that fit into the frame."""
        return (self.tokens - self.updates) // UPDATE_WORDS


def row_words(bucket: Bucket) -> int:
    """Return the words of one row of a step frame."""
    return ROW_WORD.uniforms + bucket.tokens_per_row


def max_block_table_updates(bucket: Bucket, *, groups: int, block_size: int) -> int:
    """Return the most block table updates that one step of ``bucket`` can have."""
    return groups * (bucket.rows + bucket.tokens // block_size)


def layout(bucket: Bucket, *, groups: int, block_size: int) -> Layout:
    """Return the positions of the parts of a step frame of ``bucket``."""
    updates = HEADER + bucket.rows * row_words(bucket)
    tokens = updates + UPDATE_WORDS * max_block_table_updates(
        bucket, groups=groups, block_size=block_size
    )
    return Layout(HEADER, updates, tokens, tokens + bucket.tokens)


def admit_size(groups: int, max_blocks_per_seq: int) -> int:
    """Return the words of an admission or a release."""
    return ADMISSION_WORD.blocks + groups * max_blocks_per_seq


def header(frame: Any) -> Header:
    """Read and check the first words of a frame; raises :class:`ProtocolError`."""
    if frame.ndim != 1 or frame.shape[0] < HEADER or frame.dtype.str != INT32:
        raise ProtocolError(
            f"frame: found {frame.dtype} {list(frame.shape)}, "
            f"expected int32 [words] of at least {HEADER}"
        )
    head = Header(*frame[: len(Header._fields)].tolist())
    if head.version != VERSION:
        raise ProtocolError(
            f"frame {_word('version')}: found {head.version:#x}, accepts {VERSION:#x}"
        )
    if head.kind not in (STEP, ADMIT, RELEASE, TOKEN_BIAS):
        raise ProtocolError(f"frame {_word('kind')}: found {head.kind}, accepts 0 to 3")
    if head.kind == STEP:
        _check_step(head)
    return head


def _check_step(head: Header) -> None:
    if not 0 <= head.sampler < len(SAMPLERS):
        raise ProtocolError(
            f"frame {_word('sampler')}: found {head.sampler}, "
            f"accepts 0 to {len(SAMPLERS) - 1} ({', '.join(SAMPLERS)})"
        )
    if head.reserved:
        raise ProtocolError(
            f"frame {_word('reserved')}: found {head.reserved}, accepts 0"
        )
    for name, least in _LEAST.items():
        if (value := getattr(head, name)) < least:
            raise ProtocolError(
                f"frame {_word(name)}: found {value}, accepts {least} and more"
            )
    for name, most in _MOST.items():
        value, limit = getattr(head, name), getattr(head, most)
        if value > limit:
            raise ProtocolError(
                f"frame {_word(name)}: found {value}, "
                f"accepts up to {limit}, the header's {most}"
            )


_LEAST = {
    "tokens": 1, "rows": 1, "tokens_per_row": 1, "decode_rows": 0, "used_rows": 0,
    "used_tokens": 0, "used_updates": 0,
}  # fmt: skip
_MOST = {"decode_rows": "used_rows", "used_rows": "rows", "used_tokens": "tokens"}


def _word(name: str) -> str:
    return f"word {getattr(HEADER_WORD, name)} ({name})"
