"""The one int32 array that carries everything a runner is told, both ways.

A frame is a header of :data:`HEADER` words and a body. A step's body is, in order::

    rows    [R, 2 + W]   slot, count, float32 bits of one uniform per sampled position
    cells   [C, 4]       block table cells that changed: group, slot, place, block
    tokens  [T]          prompt ids or drafts; -1 is the row's own last token

with ``C = cells_in(bucket)``. An admission's body is slot, length (tokens whose keys
and values are in the given blocks already), last token, adapter, the float32 bits of
:data:`~inl.spec.step.PARAMS`, then the block table ``[G, B]``. A release names only
the slot. Marks follow the admission of a sequence for which some tokens are special:
slot, how many, then ``[MARKS, 3]``: token, how often it is held (as in
``Tables.token_counts``), float32 bits of its bias. They add up, and each names a token once.
Padding is zeros: slot 0 and block 0 belong to nobody, and a mark of 0 adds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import ProtocolError
from inl.spec.step import NEUTRAL, PARAMS, SAMPLERS, Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int32]

INT32 = "<i4" if sys.byteorder == "little" else ">i4"
"""How NumPy spells the dtype of a frame."""

VERSION = 0x494E4C01
"""First word of every frame."""

HEADER = 16
STEP, ADMIT, RELEASE, TOKEN_BIAS = 0, 1, 2, 3
MAX_TOKEN_BIASES = 256
"""Tokens that one frame of marks can name."""
MASKED = 1
"""Flag: the runner waits for ``sample`` before it picks this step's tokens."""


class Header(NamedTuple):
    """The first words of a frame, by name."""

    version: int
    kind: int
    step: int
    tokens: int
    rows: int
    tokens_per_row: int
    sampler: int
    flags: int
    repeat: int
    decode_rows: int
    used_rows: int
    used_tokens: int
    used_updates: int

    @property
    def bucket(self) -> Bucket:
        """The program that this step is for."""
        return Bucket(
            self.tokens, self.rows, self.tokens_per_row, SAMPLERS[self.sampler]
        )


class Row(NamedTuple):
    """One sequence's part of a step."""

    slot: int
    tokens: Sequence[int] | IntArray
    """Ids to compute; -1 is the slot's own last token."""
    uniforms: Sequence[float] = ()
    """In [0, 1), one per sampled position; missing ones are 0."""


FEEDBACK = (-1,)
"""Tokens of a decoding row: the one that the runner chose last."""


class BlockTableUpdate(NamedTuple):
    """One entry of a block table that changed."""

    group: int
    slot: int
    entry: int
    """Which entry of the slot's table."""
    block: int


class TokenBias(NamedTuple):
    """What is special about one token of a sequence."""

    token: int
    token_count: int = 0
    """Twice the times that the answer holds it, plus 1 where the prompt does."""
    bias: float = 0.0
    """Added to its logit."""


class Layout(NamedTuple):
    """Where the parts of a step's body begin, in words."""

    rows: int
    updates: int
    tokens: int
    size: int


def max_block_table_updates(bucket: Bucket, *, groups: int, block_size: int) -> int:
    """Most block table cells that one step of ``bucket`` can change."""
    return groups * (bucket.rows + bucket.tokens // block_size)


def layout(bucket: Bucket, *, groups: int, block_size: int) -> Layout:
    """Place the parts of a step of ``bucket``."""
    cells = HEADER + bucket.rows * (2 + bucket.tokens_per_row)
    tokens = cells + 4 * max_block_table_updates(
        bucket, groups=groups, block_size=block_size
    )
    return Layout(HEADER, cells, tokens, tokens + bucket.tokens)


def step_frame(
    bucket: Bucket,
    rows: Sequence[Row],
    cells: Sequence[BlockTableUpdate] = (),
    *,
    step: int,
    groups: int,
    block_size: int,
    decode_rows: int,
    flags: int = 0,
) -> IntArray:
    """Write the message of one step, with its ``decode_rows`` decoding rows first.

    Raises :class:`ProtocolError` where the rows, tokens or cells exceed the bucket.
    """
    import numpy as np

    place = layout(bucket, groups=groups, block_size=block_size)
    counts = [len(row.tokens) for row in rows]
    used_tokens = sum(counts)
    _fit("rows", len(rows), bucket.rows)
    _fit("tokens", used_tokens, bucket.tokens)
    _fit("cells", len(cells), (place.tokens - place.updates) // 4)
    frame = np.zeros(place.size, np.int32)
    sampler = SAMPLERS.index(bucket.sampler)
    frame[: len(Header._fields)] = Header(
        VERSION, STEP, step, bucket.tokens, bucket.rows, bucket.tokens_per_row, sampler, flags,
        1, decode_rows, len(rows), used_tokens, len(cells),
    )  # fmt: skip
    table = frame[place.rows : place.updates].reshape(
        bucket.rows, 2 + bucket.tokens_per_row
    )
    used = len(rows)
    table[:used, 0] = [row.slot for row in rows]
    table[:used, 1] = counts
    single = next((i for i, count in enumerate(counts) if count != 1), used)
    at = place.tokens + single
    frame[place.tokens : at] = [row.tokens[0] for row in rows[:single]]
    for row in rows[single:]:
        frame[at : at + len(row.tokens)] = row.tokens
        at += len(row.tokens)
    if any(row.uniforms for row in rows):
        blank = (0.0,) * bucket.tokens_per_row
        drawn = [(*row.uniforms, *blank)[: bucket.tokens_per_row] for row in rows]
        table[:used, 2:] = np.array(drawn, np.float32).view(np.int32)
    if cells:
        frame[place.updates : place.updates + 4 * len(cells)] = np.array(
            cells, np.int32
        ).ravel()
    return frame


def admit_frame(
    slot: int,
    blocks: Sequence[Sequence[int]],
    *,
    groups: int,
    max_blocks_per_seq: int,
    length: int = 0,
    last: int = 0,
    adapter: int = 0,
    **params: float,
) -> IntArray:
    """Give ``slot`` to a sequence whose first ``length`` tokens lie in ``blocks``.

    params: by the names of :data:`~inl.spec.step.PARAMS`; a missing one is neutral.
    """
    import numpy as np

    frame = np.zeros(admit_size(groups, max_blocks_per_seq), np.int32)
    frame[:3] = VERSION, ADMIT, 0
    frame[HEADER : HEADER + 4] = slot, length, last, adapter
    if unknown := sorted(set(params) - set(PARAMS)):
        raise ProtocolError(f"params: found {unknown}, knows {', '.join(PARAMS)}")
    neutral = zip(PARAMS, NEUTRAL, strict=True)
    values = [params.get(name, value) for name, value in neutral]
    bits = np.asarray(values, np.float32).view(np.int32)
    frame[HEADER + 4 : HEADER + 4 + len(PARAMS)] = bits
    table = frame[HEADER + 4 + len(PARAMS) :].reshape(groups, max_blocks_per_seq)
    _fit("cache groups", len(blocks), groups)
    for group, ids in enumerate(blocks):
        _fit("blocks of a sequence", len(ids), max_blocks_per_seq)
        table[group, : len(ids)] = ids
    return frame


def release_frame(slot: int, *, groups: int, max_blocks_per_seq: int) -> IntArray:
    """Take ``slot`` back; its table points to nobody's block again."""
    import numpy as np

    frame = np.zeros(admit_size(groups, max_blocks_per_seq), np.int32)
    frame[:2] = VERSION, RELEASE
    frame[HEADER] = slot
    return frame


def token_bias_frame(slot: int, marks: Sequence[TokenBias]) -> IntArray:
    """Tell the counts and biases of up to :data:`MARKS` tokens of ``slot``."""
    import numpy as np

    _fit("marks", len(marks), MAX_TOKEN_BIASES)
    frame = np.zeros(TOKEN_BIAS_SIZE, np.int32)
    frame[:2] = VERSION, TOKEN_BIAS
    frame[HEADER : HEADER + 2] = slot, len(marks)
    table = frame[HEADER + 2 :].reshape(MAX_TOKEN_BIASES, 3)
    if marks:
        table[: len(marks), :2] = [(mark.token, mark.token_count) for mark in marks]
        biases = np.array([mark.bias for mark in marks], np.float32)
        table[: len(marks), 2] = biases.view(np.int32)
    return frame


TOKEN_BIAS_SIZE = HEADER + 2 + 3 * MAX_TOKEN_BIASES
"""Words of a frame of marks."""


def admit_size(groups: int, max_blocks_per_seq: int) -> int:
    """Words of an admission or a release."""
    return HEADER + 4 + len(PARAMS) + groups * max_blocks_per_seq


def header(frame: Any) -> Header:
    """Read and check the first words of a frame; raises :class:`ProtocolError`."""
    if frame.ndim != 1 or frame.shape[0] < HEADER or frame.dtype.str != INT32:
        raise ProtocolError(
            f"frame: found {frame.dtype} {list(frame.shape)}, "
            f"expected int32 [words] of at least {HEADER}"
        )
    found = Header(*frame[: len(Header._fields)].tolist())
    if found.version != VERSION:
        raise ProtocolError(
            f"frame word 0 (version): found {found.version:#x}, speaks {VERSION:#x}"
        )
    if found.kind not in (STEP, ADMIT, RELEASE, TOKEN_BIAS):
        raise ProtocolError(f"frame word 1 (kind): found {found.kind}, knows 0 to 3")
    if found.kind == STEP:
        _check_step(found)
    return found


def _check_step(found: Header) -> None:
    if not 0 <= found.sampler < len(SAMPLERS):
        raise ProtocolError(
            f"frame word 6 (sampler): found {found.sampler}, knows {SAMPLERS}"
        )
    if found.repeat != 1:
        raise ProtocolError(f"frame word 8 (repeat): found {found.repeat}, serves 1")
    sizes = found.tokens, found.rows, found.tokens_per_row
    used = found.decode_rows, found.used_rows, found.used_tokens
    if min(sizes) < 1 or min(used) < 0 or found.used_updates < 0:
        raise ProtocolError(f"frame words 3 to 12: found {sizes} {used}, below range")
    if found.decode_rows > found.used_rows:
        raise ProtocolError(
            f"frame word 9, decoding rows: found {found.decode_rows}, "
            f"of {found.used_rows} rows"
        )
    if found.used_rows > found.rows or found.used_tokens > found.tokens:
        raise ProtocolError(
            f"frame words 10, 11: {used[1:]} exceed the bucket {sizes[:2]}"
        )


def _fit(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise ProtocolError(f"{what}: found {found}, the frame holds {limit}")
