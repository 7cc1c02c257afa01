"""The one int32 array that carries everything a runner is told, both ways.

A frame is a header of :data:`HEADER` words and a body. A step's body is, in order::

    rows    [R, 2 + W]   slot, count, float32 bits of one uniform per sampled position
    cells   [C, 4]       block table cells that changed: group, slot, place, block
    tokens  [T]          prompt ids or drafts; -1 is the row's own last token

with ``C = cells_in(bucket)``. An admission's body is slot, length (tokens whose keys
and values are in the given blocks already), last token, adapter, the float32 bits of
:data:`~inl.spec.values.PARAMS`, then the block table ``[G, B]``. A release names only
the slot. Padding is zeros: slot 0 and block 0 belong to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import ProtocolError
from inl.spec.values import PARAMS, SAMPLERS, Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int32]

VERSION = 0x494E4C01
"""First word of every frame."""

HEADER = 16
STEP, ADMIT, RELEASE = 0, 1, 2
MASKED = 1
"""Flag: the runner waits for ``choose`` before it picks this step's tokens."""


class Header(NamedTuple):
    """The first words of a frame, by name."""

    version: int
    kind: int
    step: int
    tokens: int
    rows: int
    width: int
    sampler: int
    flags: int
    repeat: int
    decode_rows: int
    used_rows: int
    used_tokens: int
    used_cells: int

    @property
    def bucket(self) -> Bucket:
        """The program that this step is for."""
        return Bucket(self.tokens, self.rows, self.width, SAMPLERS[self.sampler])


class Row(NamedTuple):
    """One sequence's part of a step."""

    slot: int
    tokens: Sequence[int]
    """Ids to compute; -1 is the slot's own last token."""
    uniforms: Sequence[float] = ()
    """In [0, 1), one per sampled position; missing ones are 0."""


class Cell(NamedTuple):
    """One entry of a block table that changed."""

    group: int
    slot: int
    place: int
    """Which entry of the slot's table."""
    block: int


class Layout(NamedTuple):
    """Where the parts of a step's body begin, in words."""

    rows: int
    cells: int
    tokens: int
    size: int


def cells_in(bucket: Bucket, *, groups: int, block_size: int) -> int:
    """Most block table cells that one step of ``bucket`` can change."""
    return groups * (bucket.rows + bucket.tokens // block_size)


def layout(bucket: Bucket, *, groups: int, block_size: int) -> Layout:
    """Place the parts of a step of ``bucket``."""
    cells = HEADER + bucket.rows * (2 + bucket.width)
    tokens = cells + 4 * cells_in(bucket, groups=groups, block_size=block_size)
    return Layout(HEADER, cells, tokens, tokens + bucket.tokens)


def step_frame(
    bucket: Bucket,
    rows: Sequence[Row],
    cells: Sequence[Cell] = (),
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
    used_tokens = sum(len(row.tokens) for row in rows)
    _fit("rows", len(rows), bucket.rows)
    _fit("tokens", used_tokens, bucket.tokens)
    _fit("cells", len(cells), (place.tokens - place.cells) // 4)
    frame = np.zeros(place.size, np.int32)
    sampler = SAMPLERS.index(bucket.sampler)
    frame[: len(Header._fields)] = Header(
        VERSION, STEP, step, bucket.tokens, bucket.rows, bucket.width, sampler, flags,
        1, decode_rows, len(rows), used_tokens, len(cells),
    )  # fmt: skip
    table = frame[place.rows : place.cells].reshape(bucket.rows, 2 + bucket.width)
    used = len(rows)
    table[:used, 0] = [row.slot for row in rows]
    table[:used, 1] = [len(row.tokens) for row in rows]
    tokens = [token for row in rows for token in row.tokens]
    frame[place.tokens : place.tokens + used_tokens] = tokens
    if any(row.uniforms for row in rows):
        blank = (0.0,) * bucket.width
        drawn = [(*row.uniforms, *blank)[: bucket.width] for row in rows]
        table[:used, 2:] = np.array(drawn, np.float32).view(np.int32)
    if cells:
        frame[place.cells : place.cells + 4 * len(cells)] = np.array(
            cells, np.int32
        ).ravel()
    return frame


def admit_frame(
    slot: int,
    blocks: Sequence[Sequence[int]],
    *,
    groups: int,
    width: int,
    length: int = 0,
    last: int = 0,
    adapter: int = 0,
    temperature: float = 0.0,
) -> IntArray:
    """Give ``slot`` to a sequence whose first ``length`` tokens lie in ``blocks``."""
    import numpy as np

    frame = np.zeros(admit_size(groups, width), np.int32)
    frame[:3] = VERSION, ADMIT, 0
    frame[HEADER : HEADER + 4] = slot, length, last, adapter
    params = np.asarray([temperature], np.float32)
    frame[HEADER + 4 : HEADER + 4 + len(PARAMS)] = params.view(np.int32)
    table = frame[HEADER + 4 + len(PARAMS) :].reshape(groups, width)
    _fit("cache groups", len(blocks), groups)
    for group, ids in enumerate(blocks):
        _fit("blocks of a sequence", len(ids), width)
        table[group, : len(ids)] = ids
    return frame


def release_frame(slot: int, *, groups: int, width: int) -> IntArray:
    """Take ``slot`` back; its table points to nobody's block again."""
    frame = admit_frame(slot, (), groups=groups, width=width)
    frame[1] = RELEASE
    return frame


def admit_size(groups: int, width: int) -> int:
    """Words of an admission or a release."""
    return HEADER + 4 + len(PARAMS) + groups * width


def header(frame: Any) -> Header:
    """Read and check the first words of a frame; raises :class:`ProtocolError`."""
    if frame.ndim != 1 or frame.shape[0] < HEADER or frame.dtype.name != "int32":
        raise ProtocolError(
            f"frame: found {frame.dtype} {list(frame.shape)}, "
            f"expected int32 [words] of at least {HEADER}"
        )
    found = Header(*(int(word) for word in frame[: len(Header._fields)]))
    if found.version != VERSION:
        raise ProtocolError(
            f"frame word 0 (version): found {found.version:#x}, speaks {VERSION:#x}"
        )
    if found.kind not in (STEP, ADMIT, RELEASE):
        raise ProtocolError(
            f"frame word 1 (kind): found {found.kind}, knows 0, 1 and 2"
        )
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
    sizes = found.tokens, found.rows, found.width
    used = found.decode_rows, found.used_rows, found.used_tokens
    if min(sizes) < 1 or min(used) < 0 or found.used_cells < 0:
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
