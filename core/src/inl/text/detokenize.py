"""Incremental detokenizer: text of a token stream, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, final

from inl.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"

MAX_PENDING: Final = 8
"""Tokens after which a trailing U+FFFD is taken as text, not as a partial character."""


@final
class Detokenizer:
    """Converts the tokens of one sequence to text, in linear time.

    The results of :meth:`add` or :meth:`extend` and :meth:`finish`, joined, equal
    ``tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        decoder = (
            _ByteDecoder(tokenizer)
            if tokenizer.byte_level
            else _WindowDecoder(tokenizer)
        )
        self._add: Callable[[int], str] = decoder.add
        self._extend: Callable[[Sequence[int]], str] = decoder.extend
        self._complete: Callable[[], str] = decoder.complete
        self._finish: Callable[[], str] = decoder.finish

    def add(self, index: int) -> str:
        """Append an id; returns the text that it completes, possibly empty."""
        return "" if index in self._skipped else self._add(index)

    def extend(self, ids: Sequence[int]) -> str:
        """Append several ids; returns the text that they complete."""
        if self._skipped and not self._skipped.isdisjoint(ids):
            ids = [index for index in ids if index not in self._skipped]
        return self._extend(ids)

    def complete(self) -> str:
        """Return the complete characters that wait for further tokens."""
        return self._complete()

    def finish(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        return self._finish()


class _ByteDecoder:
    """Decodes byte-level tokens with an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, index: int) -> str:
        return self._decoder.decode(self._bytes(index))

    def extend(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes, ids)))

    def complete(self) -> str:
        return ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDecoder:
    """Decodes other vocabularies: decodes a window of ids and returns the new suffix.

    The window includes the previously emitted ids, since the text of a token depends
    on them: the first token of a text loses its leading space, a later one does not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._emitted: list[int] = []
        self._pending: list[int] = []

    def add(self, index: int) -> str:
        if self._tokenizer.token(index) is None:
            return ""
        self._pending.append(index)
        # A run of byte-fallback tokens is decoded as a whole.
        return "" if self._tokenizer.is_byte(index) else self._emit(final=False)

    def extend(self, ids: Sequence[int]) -> str:
        return "".join(map(self.add, ids))

    def complete(self) -> str:
        return self._emit(final=False) if self._pending else ""

    def finish(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._decode(self._emitted)
        after = self._decode(self._emitted + self._pending)
        if after == before:
            return ""
        partial = after.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING
        if partial and not final:
            return ""
        self._emitted, self._pending = self._pending, []
        # Some decoders clean up across tokens; emitted text cannot change.
        pairs = enumerate(zip(before, after, strict=False))
        common = next((at for at, (old, new) in pairs if old != new), len(before))
        return after[common:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False) if ids else ""
