"""Text from tokens as they come: exact, in linear time, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, final

from inl.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"

PATIENCE: Final = 8
"""Tokens after which a replacement character is what the text holds."""


@final
class Detokenizer:
    """One sequence's text. What :meth:`add` and :meth:`finish` give, joined, is
    ``tokenizer.decode`` of all its ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        part = _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer)
        self._add: Callable[[int], str] = part.add
        self._extend: Callable[[Sequence[int]], str] = part.extend
        self._finish: Callable[[], str] = part.finish

    def add(self, index: int) -> str:
        """Take the next id; return the text that it completes, often none."""
        return "" if index in self._skipped else self._add(index)

    def extend(self, ids: Sequence[int]) -> str:
        """Take several ids; return the text that they complete."""
        return self._extend([index for index in ids if index not in self._skipped])

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character whose end never came."""
        return self._finish()


class _Bytes:
    """Where a text is its tokens' bytes: a decoder that waits for whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, index: int) -> str:
        return self._decoder.decode(self._bytes(index))

    def extend(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Where tokens are joined by other rules: decode a few, and take what is new.

    ``known`` ids were given out already and are kept because what follows may depend
    on them: a first token loses its space, a later one does not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []
        self._new: list[int] = []

    def add(self, index: int) -> str:
        if self._tokenizer.token(index) is None:
            return ""
        self._new.append(index)
        # Bytes by fallback become characters together or not at all.
        return "" if self._tokenizer.is_byte(index) else self._take(final=False)

    def extend(self, ids: Sequence[int]) -> str:
        return "".join(map(self.add, ids))

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._known)
        after = self._decode(self._known + self._new)
        if after == before:
            return ""
        waits = after.endswith(REPLACEMENT) and len(self._new) < PATIENCE
        if waits and not final:
            return ""
        self._known, self._new = self._new, []
        # Some decoders clean up across tokens; what was given out stays.
        pairs = enumerate(zip(before, after, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), len(before))
        return after[same:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False) if ids else ""
