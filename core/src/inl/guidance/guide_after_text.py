"""A guide of output that begins with free text, such as reasoning, up to a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from inl.protocol.token_masks import mask_width

if TYPE_CHECKING:
    from inl.scheduling.guide import Guide
    from inl.spec.message import IntArray


class FreeText:
    """The tokens that may continue free text up to ``mark``.

    tokens: bytes of each token. End tokens may not; nor may one that goes on with other
    than white space behind the mark, which no grammar could check. Shared by all guides
    of one mark.
    """

    def __init__(
        self, mark: bytes, tokens: Sequence[bytes], vocab: int, end_ids: Sequence[int]
    ) -> None:
        self.mark = mark
        self.end_ids = frozenset(end_ids)
        self._tokens = tokens
        self._mask = np.zeros(mask_width(vocab) * 32, bool)
        self._mask[:vocab] = True
        self._mask[list(end_ids)] = False
        self._passing = [at for at, b in enumerate(tokens) if mark[-1:] in b[:-1]]
        self._masks: dict[bytes, IntArray] = {}

    def after(self, begun: bytes, token: int) -> bytes | None:
        """Return the part of the mark that is begun behind a token; ``None``: all."""
        text = begun + self._bytes(token)
        if self.mark in text:
            return None
        for size in range(min(len(text), len(self.mark) - 1), 0, -1):
            if text.endswith(self.mark[:size]):
                return text[-size:]
        return b""

    def allows(self, begun: bytes, token: int) -> bool:
        """Whether a token may follow."""
        mask = self.mask(begun)
        in_mask = 0 <= token < 32 * len(mask)
        return in_mask and bool(int(mask[token // 32]) >> (token % 32) & 1)

    def mask(self, begun: bytes) -> IntArray:
        """Return int32 [ceil(V / 32)]: the tokens that may follow."""
        if begun not in self._masks:
            allowed = self._mask.copy()
            for token in self._passing:
                _, found, rest = (begun + self._tokens[token]).partition(self.mark)
                if found and rest.strip():
                    allowed[token] = False
            packed = np.packbits(allowed, bitorder="little")
            self._masks[begun] = packed.view(np.int32)
        return self._masks[begun]

    def _bytes(self, token: int) -> bytes:
        return self._tokens[token] if token < len(self._tokens) else b""


class GuideAfterText:
    """Implements :class:`~inl.scheduling.guide.Guide`: free text, then ``guide``.

    guide: in the state before its first token.
    """

    def __init__(self, text: FreeText, guide: Guide) -> None:
        self._text = text
        self._guide = guide
        self._begun: bytes | None = b""
        """The part of the mark at the end of the text; ``None`` behind the mark."""

    def restart(self) -> None:
        self._begun = b""
        self._guide.restart()

    def copy(self) -> GuideAfterText:
        return GuideAfterText(self._text, self._guide.copy())

    @property
    def is_complete(self) -> bool:
        return self._begun is None and self._guide.is_complete

    @property
    def forced(self) -> Sequence[int]:
        return self._guide.forced if self._begun is None else ()

    def advance(self, token: int) -> None:
        if self._begun is None:
            self._guide.advance(token)
        else:
            self._begun = self._text.after(self._begun, token)

    def masks(self, drafts: Sequence[int] = ()) -> IntArray:
        rows: list[IntArray] = []
        begun = self._begun
        for at, draft in enumerate(drafts):
            if begun is None:
                return self._with(rows, drafts[at:])
            rows.append(self._text.mask(begun))
            if not self._text.allows(begun, draft):
                return np.stack(rows)
            begun = self._text.after(begun, draft)
        if begun is None:
            return self._with(rows, ())
        return np.stack([*rows, self._text.mask(begun)])

    def accepts(self, drafts: Sequence[int]) -> int:
        begun = self._begun
        for at, draft in enumerate(drafts):
            if begun is None:
                return at + self._guide.accepts(drafts[at:])
            if not self._text.allows(begun, draft):
                return at
            begun = self._text.after(begun, draft)
        return len(drafts)

    def _with(self, rows: list[IntArray], drafts: Sequence[int]) -> IntArray:
        """Return rows, and those of the guide behind the mark."""
        return np.concatenate([*(row[None] for row in rows), self._guide.masks(drafts)])
