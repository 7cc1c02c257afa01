"""Contents of one sequence's cache that another engine goes on from, slots included.

Blocks of leading tokens are shared by their keys, and need no more than that. State
that every token changes belongs to one position of one sequence: it travels with all
blocks before this position, the last one in part, and with the request that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inl.errors import ProtocolError
from inl.kv_transfer.spans import Recut, TokenSpan, checked_index, cut_tokens
from inl.spec.cache_layout import SLOT_GROUP, copied

if TYPE_CHECKING:
    from inl.spec.cache_layout import CacheLayout, Parts
    from inl.spec.limits import Limits

MAX_BYTES = 1 << 30
"""Contents that wait in host memory for the admission of their requests."""


@dataclass(frozen=True, slots=True)
class CarriedState:
    """State of a sequence after its first ``tokens``, in blocks of one engine."""

    tokens: int
    blocks: tuple[tuple[tuple[int, Parts], ...], ...]
    """Index and contents of each block, for each cache group."""
    slot: Parts
    """Empty for a model whose blocks hold all of it."""

    @property
    def nbytes(self) -> int:
        """Size of all contents."""
        each = [parts for group in self.blocks for _, parts in group]
        return sum(
            part.data.nbytes for parts in (*each, self.slot) for part in parts.values()
        )


def slot_span(tokens: int, parts: Parts) -> TokenSpan:
    """Return contents of a slot after so many tokens, as they travel."""
    return TokenSpan(SLOT_GROUP, tokens, 1, parts)


def until(span: TokenSpan, stop: int) -> list[TokenSpan]:
    """Return a span without the tokens from a position on.

    What a block holds behind them is of other sequences, and stays here.
    """
    count = (min(span.stop, stop) - span.start) // span.block_size
    whole = span.start + count * span.block_size
    spans = [
        cut_tokens(span, span.start, whole, span.block_size),
        cut_tokens(span, whole, min(span.stop, stop), 1),
    ]
    return [each for each in spans if each is not None]


class CarriedSpans:
    """Joins spans of one sequence to a :class:`CarriedState` in blocks of this engine.

    limits, layout: of its runner. has_slot: whether its tokens change a slot.
    """

    def __init__(
        self, limits: Limits, layout: CacheLayout, *, has_slot: bool = True
    ) -> None:
        self._limits, self._layout, self._has_slot = limits, layout, has_slot
        self._recuts = [Recut(group) for group in layout.groups]
        self._blocks: list[dict[int, Parts]] = [{} for _ in layout.groups]
        self._slot: TokenSpan | None = None

    def add(self, span: TokenSpan) -> int:
        """Add contents; returns the number of whole blocks that they complete.

        Raises :class:`~inl.errors.ProtocolError` for contents of another layout.
        """
        if span.group == SLOT_GROUP and self._has_slot:
            if span.start < 1:
                raise ProtocolError(f"contents: found a slot after {span.start} tokens")
            self._layout.check(SLOT_GROUP, 1, span.parts)
            self._slot = span._replace(parts=copied(span.parts))
            return 0
        blocks = dict(checked_index(self._recuts, span.group).add(span))
        self._blocks[span.group].update(blocks)
        return len(blocks)

    def state(self, most: int) -> CarriedState | None:
        """Return the state of ``most`` tokens at most; ``None`` if a part is missing.

        Without a slot, that of as many whole blocks as every group has.
        """
        size, groups = self._limits.block_size, []
        if self._has_slot:
            tokens = 0 if self._slot is None else self._slot.start
        else:
            whole = min(max(each, default=-1) + 1 for each in self._blocks)
            tokens = min(whole, most // size) * size
        if not 0 < tokens <= most:
            return None
        for group, (blocks, recut) in enumerate(
            zip(self._blocks, self._recuts, strict=True)
        ):
            found = blocks
            if tokens % size and (rest := recut.rest()) is not None:
                found = {**blocks, rest[0]: rest[1]}
            first = self._limits.before_window(group, tokens)
            needed = range(first, -(-tokens // size))
            if recut.stop < tokens or not found.keys() >= set(needed):
                return None
            groups.append(tuple((index, found[index]) for index in needed))
        slot = {} if self._slot is None else self._slot.parts
        return CarriedState(tokens, tuple(groups), slot)
