"""The text of a request's output, decoded when it is read or searched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from inl.engine.fair_lock import FairLock
from inl.engine.stop_strings import StopStringFilter, last_bytes
from inl.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

    TextIds = Callable[[int], list[int]]
    """Returns the tokens of the text from an index on."""

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


def without(text: str, spans: Sequence[Span]) -> str:
    """Return a text without some parts of it, which are in order."""
    if not spans:
        return text
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(text)]
    return "".join(text[a:b] for a, b in zip(ends, starts, strict=True))


class OutputText:
    """Decodes tokens up to the first stop string. Thread-safe.

    Stop strings are found in the text of special tokens too, which is left out of what
    :meth:`read` and :meth:`take` return.
    If an exception interrupts the decoding, the next call decodes all tokens again.
    tokenizer: ``None`` for a model without one; the text is then empty. skip_special:
    whether to leave out the text of special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop_strings: tuple[str, ...],
        *,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._skip_special = skip_special
        self._taken = (0, 0)
        """Chunks and characters that :meth:`take` has returned."""
        self._last_bytes: frozenset[int] | None = None
        if stop_strings and tokenizer is not None and tokenizer.byte_level:
            self._last_bytes = last_bytes(stop_strings)
        self._lock = FairLock()
        self._is_torn = False
        """Whether a call is decoding, or was interrupted while it did."""
        self._begin()

    def _begin(self) -> None:
        # Made when text is read: another process may read it instead.
        self._detokenizer: Detokenizer | None = None
        self._filter = StopStringFilter(self._stop_strings)
        self._chunks: list[str] = []
        """The text up to what is held back, special tokens included."""
        self._special: list[Span] = []
        """Places of special tokens in the text."""
        self._characters = 0
        """Decoded so far, what is held back included."""
        self._decoded_tokens = 0
        self._is_flushed = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._filter.found

    def may_stop(self, token: int) -> bool:
        """Whether a token may complete a stop string, so that text must be updated."""
        if self._tokenizer is None or self._last_bytes is None:
            return True
        if token in self._tokenizer.special_ids:
            return True
        return not self._last_bytes.isdisjoint(self._tokenizer.token_bytes(token))

    def update(self, ids: TextIds, *, ended: bool) -> None:
        """Decode new tokens; ``ended``: whether no more will follow."""
        # A finalizer may call this while the same thread is decoding, which goes on.
        if self._tokenizer is not None and not self._lock.is_mine:
            self._lock.run(partial(self._update, ids, ended=ended))

    def read(self, ids: TextIds, *, ended: bool) -> str:
        """Decode new tokens and return the text so far."""
        self.update(ids, ended=ended)
        text = "".join(self._chunks)
        return without(text, self._spans(0, len(text)))

    def take(self, ids: TextIds, *, ended: bool) -> str:
        """Decode new tokens and return the text that was not yet taken."""
        text, special = self.take_whole(ids, ended=ended)
        return without(text, special) if special else text

    def take_whole(self, ids: TextIds, *, ended: bool) -> tuple[str, list[Span]]:
        """As :meth:`take`, with special tokens; returns their places in it too."""
        if self._tokenizer is None:
            return "", []
        return self._lock.run(partial(self._take, ids, ended=ended))

    def _take(self, ids: TextIds, *, ended: bool) -> tuple[str, list[Span]]:
        self._update(ids, ended=ended)
        chunks, start = self._taken
        text = "".join(self._chunks[chunks:])
        self._taken = len(self._chunks), start + len(text)
        return text, self._spans(start, start + len(text)) if self._special else []

    def _spans(self, start: int, stop: int) -> list[Span]:
        """Return the places of special tokens in a part of the text."""
        first = bisect_right(self._special, start, key=lambda span: span[1])
        return [
            (max(a, start) - start, min(b, stop) - start)
            for a, b in self._special[first:]
            if a < stop
        ]

    def _update(self, ids: TextIds, *, ended: bool) -> None:
        was_torn, self._is_torn = self._is_torn, True
        if was_torn:
            self._begin()
        self._decode(ids(self._decoded_tokens), ended=ended)
        if was_torn:
            text, (_, taken) = "".join(self._chunks), self._taken
            self._chunks = [text[:taken], text[taken:]]
            self._taken = 1, taken
        self._is_torn = False

    def _decode(self, ids: list[int], *, ended: bool) -> None:
        assert self._tokenizer is not None, "checked by the callers"
        if self._detokenizer is None:
            # Special tokens never get there.
            self._detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        self._decoded_tokens += len(ids)
        if self._tokenizer.special_ids.isdisjoint(ids):
            if ids:
                self._append(self._detokenizer.extend(ids))
        else:
            self._decode_special(self._tokenizer, self._detokenizer, ids)
        if ended and not self._is_flushed:
            self._is_flushed = True
            self._append(self._detokenizer.finish())
            self._release(self._filter.flush())

    def _decode_special(
        self, tokenizer: Tokenizer, detokenizer: Detokenizer, ids: list[int]
    ) -> None:
        """Decode ids of which some are special."""
        # They are no part of what the detokenizer sees: with them, it would keep the
        # space that a text loses at its beginning.
        for is_special, run in groupby(ids, tokenizer.special_ids.__contains__):
            if not is_special:
                self._append(detokenizer.extend(list(run)))
                continue
            self._append(detokenizer.complete())
            start = self._characters
            self._append("".join(tokenizer.token(index) or "" for index in run))
            if self._skip_special and start < self._characters:
                self._special.append((start, self._characters))

    def _append(self, text: str) -> None:
        self._characters += len(text)
        self._release(self._filter.add(text))

    def _release(self, text: str) -> None:
        if text:
            self._chunks.append(text)
