"""Search of stop strings in text that arrives in pieces."""

from __future__ import annotations

from inl.text.detokenize import REPLACEMENT


class StopStringFilter:
    """Passes text through up to the first stop string that is complete.

    Text that may be the start of a stop string is held back. Of several stop strings
    that end at the same place, the longest is removed.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self.found: str | None = None
        """The stop string that was found; all later text is dropped."""
        self._stop_strings = stop_strings
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def add(self, text: str) -> str:
        """Add text; return what is certain to precede every stop string."""
        if self.stopped:
            return ""
        if not self._stop_strings:
            return text
        self._held += text
        matches = [
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            stop, start = min(matches)
            self.found = self._held[start:stop]
            return self._release(start)
        overlap = max(_overlap(self._held, stop) for stop in self._stop_strings)
        return self._release(len(self._held) - overlap)

    def flush(self) -> str:
        """Return the text that is held back: no more will follow."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def last_bytes(stop_strings: tuple[str, ...]) -> frozenset[int] | None:
    """Return the last byte of each stop string, in UTF-8.

    A token without any of them completes no stop string. ``None``: any token may, as
    the decoder writes U+FFFD for bytes that are not its own.
    """
    if any(text.endswith(REPLACEMENT) for text in stop_strings):
        return None
    # A surrogate, which has no UTF-8, is in no decoded text.
    return frozenset(text.encode(errors="replace")[-1] for text in stop_strings)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
