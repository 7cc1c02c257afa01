"""One answer as it grows: ids to text, stop strings held back, times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from inl.runtime.request import Event, Reason, Request
    from inl.text.tokenizer import Tokenizer


class Answer:
    """Collects a request's tokens; text that may be a stop string's begin waits."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        started: float,
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.reason: Reason | None = None
        self.error: Exception | None = None
        self.stopped = False
        """A stop string was met: the rest is not wanted."""
        self.first_token_seconds = 0.0
        self.seconds = 0.0
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._started = started
        self._shown: list[str] = []
        self._held = ""
        self._taken = 0

    @property
    def completed(self) -> bool:
        """Whether nothing more will come."""
        return self.reason is not None

    @property
    def text(self) -> str:
        """The answer so far, without what is held back."""
        return "".join(self._shown)

    def take(self) -> str:
        """Text that became certain since the last call."""
        pieces = self._shown[self._taken :]
        self._taken = len(self._shown)
        return "".join(pieces)

    def hear(self, event: Event, now: float) -> bool:
        """Take the scheduler's word, a token, the end, or both; tell if that is all."""
        if event.token is not None:
            if not self.token_ids:
                self.first_token_seconds = now - self._started
            self.token_ids.append(event.token)
            if event.reason != "stop":
                self._add(self._detokenizer.add(event.token))
        if event.reason is not None and not self.stopped:
            self._add(self._detokenizer.finish())
        if self.stopped:
            self.reason = "stop"
        elif event.reason is not None:
            self._show(self._held)
            self._held = ""
            self.reason = event.reason
            self.error = event.error
        self.seconds = now - self._started
        return self.completed

    def _add(self, text: str) -> None:
        if self.stopped:
            return
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._show(self._held[: min(found)])
            self._held = ""
            self.stopped = True
            return
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        self._show(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
