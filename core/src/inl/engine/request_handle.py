"""One answer as it grows: ids to text, stop strings held back, times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

from inl.errors import RequestError, RunnerError
from inl.scheduling.request import Event
from inl.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from inl.scheduling.request import Reason, Request
    from inl.scheduling.sampling_params import TokenLogprob
    from inl.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. ``str()`` of it is its text."""

    text: str
    token_ids: tuple[int, ...]
    """Every token of the answer, an end token included."""
    finish_reason: Reason
    """"stop": an end token or a stop string; "length"; "cancelled"."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were there already."""
    first_token_seconds: float = 0.0
    """From the call to the answer's first token."""
    seconds: float = 0.0
    """From the call to the answer's end."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, where they were asked for."""

    def __str__(self) -> str:
        return self.text


class RequestHandle:
    """A request as it is answered: what ``InferenceEngine.submit`` gives.

    It grows while something drives the engine: ``generate``, ``stream`` or their async
    twins. :attr:`text` is what is certain so far, :meth:`take` what came since the last
    call, :attr:`reason` is set once it has ended. ``InferenceEngine.cancel`` ends it.

    Text that may be the begin of a stop string waits. A stop string ends the text where
    it was complete first; of several that end there, the longest is cut off.
    """

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
        self.listener: Callable[[], None] | None = None
        """Called after each event, by the thread that steps the engine."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._started = started
        self._shown: list[str] = []
        self._held = ""
        self._taken = 0
        self._spoken = 0
        """Tokens that belong to the text."""
        self._read = 0
        """Tokens that are text already; the rest waits until somebody looks."""
        self._ended = self._finished = False
        self._reading = Lock()

    @property
    def completed(self) -> bool:
        """Whether nothing more will come."""
        return self.reason is not None

    @property
    def text(self) -> str:
        """The answer so far, without what is held back."""
        self._catch_up()
        return "".join(self._shown)

    def take(self) -> str:
        """Text that became certain since the last call."""
        self._catch_up()
        pieces = self._shown[self._taken :]
        # Another thread may have added more by now.
        self._taken += len(pieces)
        return "".join(pieces)

    def apply_event(self, event: Event, now: float) -> bool:
        """Take the scheduler's word, a token, the end, or both; tell if that is all."""
        if event.token is not None:
            if not self.token_ids:
                self.first_token_seconds = now - self._started
            self.token_ids.append(event.token)
            if event.reason != "stop":
                self._spoken += 1
        if event.reason is not None:
            self._ended = True
        if self._stops:
            self._catch_up()
        self.seconds = now - self._started
        # The reason comes last: another thread looks at the rest once it is there.
        if self.stopped:
            self.reason = "stop"
        elif event.reason is not None:
            self.error = event.error
            self.reason = event.reason
        if self.listener is not None:
            self.listener()
        return self.reason is not None

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if not self.completed:
            self.apply_event(
                Event(self.request.id, None, "error", error), perf_counter()
            )

    def completion(self) -> Completion:
        """What it came to; raises what it ended with, if that is an error."""
        if isinstance(self.error, RequestError):
            raise self.error
        if self.error is not None:
            kind = type(self.error)
            raise (kind if issubclass(kind, RunnerError) else RunnerError)(
                f"generation failed: {self.error}"
            ) from self.error
        assert self.reason is not None, "asked for the completion of an open answer"
        request = self.request
        scores = request.scores[: len(self.token_ids)]
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            first_token_seconds=self.first_token_seconds,
            seconds=self.seconds,
            logprobs=None if request.logprobs is None else tuple(scores),
        )

    def _catch_up(self) -> None:
        """Turn what came since into text: asked for, or where a stop may be in it."""
        with self._reading:
            ended = self._ended
            ids = self.token_ids[self._read : self._spoken]
            self._read += len(ids)
            if ids:
                self._add(self._detokenizer.extend(ids))
            if ended and not self._finished:
                self._finished = True
                self._add(self._detokenizer.finish())
                self._show(self._held)
                self._held = ""

    def _add(self, text: str) -> None:
        if self.stopped:
            return
        if not self._stops:
            self._show(text)
            return
        self._held += text
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := self._held.find(stop)) >= 0
        ]
        if found:
            _, begin = min(found)
            self._show(self._held[:begin])
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
