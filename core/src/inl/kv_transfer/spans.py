"""Contents of a sequence's blocks as they travel, cut to blocks of other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from inl import host_memory
from inl.dtypes import HostArray
from inl.errors import ProtocolError
from inl.kv_transfer.checksums import each
from inl.spec.cache_layout import BLOCKS, SLOT_GROUP, stored_bits

if TYPE_CHECKING:
    from inl.kv_tiers.record import Identity
    from inl.spec.cache_layout import BlockLayout, Empty, Parts


LEAST_THREADED = 256 << 10
"""Bytes of a block from which on several are copied at the same time."""


class TokenSpan(NamedTuple):
    """Contents of consecutive blocks of a sequence in one cache group, or of its slot.

    Of a slot, ``start`` is the number of tokens that its state is after.
    """

    group: int
    """``SLOT_GROUP`` for a slot."""
    start: int
    """Position of the first token."""
    block_size: int
    """Tokens of a block, where the contents come from."""
    parts: Parts

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        if self.group == SLOT_GROUP:
            return 0
        return int(self.parts["cells"].shape[BLOCKS])

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.blocks * self.block_size


class SequenceContents(NamedTuple):
    """Contents of one sequence, of another engine."""

    identity: str
    """:func:`transfer_identity` of that engine."""
    spans: Sequence[TokenSpan]


def transfer_identity(identity: Identity) -> str:
    """Return a digest of all that contents depend on beside tokens and block size."""
    layouts = [tuple(each._replace(block_size=0)) for each in identity.layouts]
    return sha256(repr((identity.model, identity.dtype, layouts)).encode()).hexdigest()


def tokens_digest(tokens: Sequence[int], stop: int) -> str:
    """Return a digest of the tokens before a position; empty if they are fewer."""
    if stop > len(tokens):
        return ""
    return sha256(np.array(tokens[:stop], "<i4").tobytes()).hexdigest()


class Recut:
    """Cuts contents of one sequence in one cache group to blocks of another size.

    empty: allocates the blocks.
    """

    def __init__(self, layout: BlockLayout, empty: Empty | None = None) -> None:
        self._layout, self._empty = layout, empty
        self._start = 0
        self._rest: dict[str, HostArray] = {}
        """Tokens from ``_start`` on that are less than a block, by part."""
        self._whole: dict[str, HostArray] = {}
        """Parts without tokens, those of constant scales."""

    def add(self, span: TokenSpan) -> Iterator[tuple[int, Parts]]:
        """Yield the index and contents of each whole block that is known now.

        They have memory of their own. Tokens that do not follow those before begin
        anew. Raises :class:`~inl.errors.ProtocolError` for contents of another layout.
        """
        check_span(span, self._layout)
        size, before = self._layout.block_size, self._length
        if self._start + before != span.start:
            self._start, self._rest, before = span.start, {}, 0
        joined = {
            name: self._joined(name, part, span) for name, part in span.parts.items()
        }
        first = -(-self._start // size)
        stop = span.stop // size
        places = [index * size - self._start for index in range(first, stop)]
        threads = len(places) if self._layout.block_bytes >= LEAST_THREADED else 1
        cut = each(threads)(partial(self._parts_of, joined), places)
        yield from zip(range(first, stop), cut, strict=True)
        at = max(stop, first) * size - self._start
        self._rest = {
            name: _copied(part, at, part.shape[BLOCKS])
            for name, part in joined.items()
            if _has_tokens(part)
        }
        self._whole = {
            name: part for name, part in joined.items() if not _has_tokens(part)
        }
        self._start += min(at, span.stop - self._start)

    @property
    def stop(self) -> int:
        """Position after the last token so far."""
        return self._start + self._length

    def rest(self) -> tuple[int, Parts] | None:
        """Return the block of the tokens that are less than one, zeros behind them."""
        size, count = self._layout.block_size, self._length
        if not count or self._start % size:
            return None
        parts = {**self._whole}
        for name, part in self._rest.items():
            shape = (*part.shape[:BLOCKS], size, *part.shape[BLOCKS + 1 :])
            data = np.zeros(shape, part.data.dtype)
            data[:, :, :count] = part.data
            parts[name] = self._block(HostArray(data, part.dtype, shape), 0)
        return self._start // size, parts

    @property
    def _length(self) -> int:
        return self._rest["cells"].shape[BLOCKS] if self._rest else 0

    def _joined(self, name: str, part: HostArray, span: TokenSpan) -> HostArray:
        """Return the tokens that were left, and those of a span, along one axis."""
        bits = stored_bits(part)
        if not _has_tokens(part):
            return HostArray(bits.copy(), part.dtype, bits.shape)
        bits = bits.reshape(*bits.shape[:BLOCKS], -1, *bits.shape[BLOCKS + 2 :])
        if self._rest and self._start != span.start:
            bits = np.concatenate([self._rest[name].data, bits], BLOCKS)
        return HostArray(bits, part.dtype, bits.shape)

    def _parts_of(self, parts: Mapping[str, HostArray], at: int) -> Parts:
        return {name: self._block(part, at) for name, part in parts.items()}

    def _block(self, part: HostArray, at: int) -> HostArray:
        """Return the block whose first token is at a place."""
        if not _has_tokens(part):
            return part
        block = _copied(part, at, at + self._layout.block_size, self._empty)
        shape = *part.shape[:BLOCKS], 1, self._layout.block_size
        shape += part.shape[BLOCKS + 1 :]
        return HostArray(block.data.reshape(shape), part.dtype, shape)


def _has_tokens(part: HostArray) -> bool:
    """Whether a part has an axis of blocks: constant scales have none."""
    return len(part.shape) > BLOCKS


def cut_tokens(
    span: TokenSpan, start: int, stop: int, block_size: int
) -> TokenSpan | None:
    """Return tokens of a span, in blocks of a size that divides them, in own memory.

    ``None`` if there are none.
    """
    if stop <= start:
        return None
    parts: dict[str, HostArray] = {}
    for name, part in span.parts.items():
        bits = stored_bits(part)
        if not _has_tokens(part):
            parts[name] = HostArray(bits, part.dtype, bits.shape)
            continue
        bits = bits.reshape(*bits.shape[:BLOCKS], -1, *bits.shape[BLOCKS + 2 :])
        bits = bits[:, :, start - span.start : stop - span.start].copy()
        bits = bits.reshape(*bits.shape[:BLOCKS], -1, block_size, *bits.shape[3:])
        parts[name] = HostArray(bits, part.dtype, bits.shape)
    return TokenSpan(span.group, start, block_size, parts)


def _copied(
    part: HostArray, start: int, stop: int, empty: Empty | None = None
) -> HostArray:
    bits = part.data[:, :, start:stop]
    data = (empty or host_memory.empty)(bits.shape, bits.dtype.name)
    np.copyto(data, bits)
    return HostArray(data, part.dtype, data.shape)


def checked_index(recuts: Sequence[Recut], group: int) -> Recut:
    """Return that of a cache group; raises :class:`~inl.errors.ProtocolError`."""
    if not 0 <= group < len(recuts):
        raise ProtocolError(
            f"contents: found cache group {group}, accepts 0 to {len(recuts) - 1}"
        )
    return recuts[group]


def check_span(span: TokenSpan, layout: BlockLayout) -> None:
    """Raise :class:`~inl.errors.ProtocolError` for contents of another layout."""
    from inl.spec.cache_layout import CacheLayout

    if span.block_size < 1 or span.start < 0 or span.start % span.block_size:
        raise ProtocolError(
            f"contents: found token {span.start} at the start of a block of "
            f"{span.block_size}"
        )
    cells = span.parts.get("cells")
    count = cells.shape[BLOCKS] if cells is not None and len(cells.shape) > 2 else 0
    own = layout._replace(block_size=span.block_size)
    CacheLayout((own,)).check(0, int(count), span.parts)
