"""The text of a request's output, decoded when it is read or searched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from inl.engine.fair_lock import FairLock
from inl.engine.stop_strings import StopStringFilter, last_bytes
from inl.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

    TextIds = Callable[[int], list[int]]
    """Returns the tokens of the text from an index on."""


class OutputText:
    """Decodes tokens up to the first stop string. Thread-safe.

    If an exception interrupts the decoding, the next call decodes all tokens again.
    tokenizer: ``None`` for a model without one; the text is then empty.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop_strings: tuple[str, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
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
        self._decoded_tokens = 0
        self._is_flushed = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._filter.stopped

    def may_stop(self, token: int) -> bool:
        """Whether a token may complete a stop string, so that text must be updated."""
        if self._tokenizer is None or self._last_bytes is None:
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
        return "".join(self._chunks)

    def take(self, ids: TextIds, *, ended: bool) -> str:
        """Decode new tokens and return the text that was not yet taken."""
        if self._tokenizer is None:
            return ""
        return self._lock.run(partial(self._take, ids, ended=ended))

    def _take(self, ids: TextIds, *, ended: bool) -> str:
        self._update(ids, ended=ended)
        chunks, characters = self._taken
        text = "".join(self._chunks[chunks:])
        self._taken = len(self._chunks), characters + len(text)
        return text

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
        if self._detokenizer is None:
            assert self._tokenizer is not None, "checked by the callers"
            self._detokenizer = Detokenizer(self._tokenizer)
        self._decoded_tokens += len(ids)
        if ids:
            self._append(self._filter.add(self._detokenizer.extend(ids)))
        if ended and not self._is_flushed:
            self._is_flushed = True
            self._append(self._filter.add(self._detokenizer.finish()))
            self._append(self._filter.flush())

    def _append(self, text: str) -> None:
        if text:
            self._chunks.append(text)
