"""The output of one request while it is generated: text, stop strings, times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from inl.engine.output_text import OutputText
from inl.errors import NonFiniteLogits, RequestError, RunnerError, message
from inl.scheduling.request import Event

# Part of Completion, and so of what the room exports.
from inl.scheduling.sampling_params import TokenLogprob as TokenLogprob

if TYPE_CHECKING:
    from inl.adapters.registry import AdapterUse
    from inl.engine.dispatcher import RequestDispatcher
    from inl.engine.output_text import Span
    from inl.scheduling.request import FinishReason, Request
    from inl.text.tokenizer import Tokenizer


QUEUE_SECONDS = 0.001
"""Between looks at a request that another thread queues."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The output of a finished request. ``str()`` of it is its text."""

    text: str
    """Empty if the model has no tokenizer."""
    token_ids: tuple[int, ...]
    """Every generated token, an end token included."""
    finish_reason: FinishReason
    """"stop": an end token, a stop string or the end of a grammar; "length": the token
    limit; "cancelled"; "deadline"."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    first_token_seconds: float = 0.0
    """Time from the call to the first generated token."""
    seconds: float = 0.0
    """Time from the call to the end."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per generated token, if requested."""
    seed: int = 0
    """Seed of sampling: the given one, or the random one that was drawn."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token, ``None`` for the first, if requested."""
    alternatives: tuple[Completion, ...] = ()
    """The other completions of the prompt, with ``n`` above 1."""

    def __str__(self) -> str:
        return self.text


class RequestHandle:
    """A submitted request, returned by ``InferenceEngine.submit``.

    Its output grows while something steps the engine: ``generate``, ``stream`` or their
    async variants. :attr:`text` is the text so far, :meth:`take` the text since the
    last call; :attr:`finish_reason` is set when it has finished. :meth:`result` steps
    the engine until then, :meth:`cancel` ends it.

    Text that may be the start of a stop string is held back. The first stop string
    that is complete ends the text before it; of several that end at the same place,
    the longest is removed.

    tokenizer: ``None`` for a model without one; the text is then empty.
    started: ``perf_counter()`` time of the call. skip_special: whether the text is
    without special tokens. is_empty: whether the one token of the request is dropped,
    as it has to generate none.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        stop_strings: tuple[str, ...],
        started: float,
        *,
        skip_special: bool = True,
        is_empty: bool = False,
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        """Every generated token, an end token included."""
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.options: Mapping[str, Any] = {}
        """Options of the request, as another engine can use them."""
        self.resumed_tokens = 0
        """Leading tokens that another engine has generated."""
        self.first_token_seconds = 0.0
        self.seconds = 0.0
        self.further_samples: tuple[RequestHandle, ...] = ()
        """Handles of the other samples, if it is the first of ``n``."""
        self.listener: Callable[[], None] | None = None
        """Called after each event, on the thread that steps the engine."""
        self.dispatcher: RequestDispatcher | None = None
        """Of the engine that generates the output."""
        self.adapter_use: AdapterUse | None = None
        """The adapter of the request, until it has finished."""
        self._text = OutputText(tokenizer, stop_strings, skip_special=skip_special)
        self._is_empty = is_empty
        self._scans_text = bool(stop_strings)
        self._started = started
        self._end_tokens = 0
        """Last tokens that are not part of the text: 1 after an end token."""
        self._has_ended = False

    # Not stored: a handle that refers to itself is freed by a garbage collection only.
    @property
    def samples(self) -> tuple[RequestHandle, ...]:
        """The first one of a prompt has the handles of all ``n``, itself included."""
        return (self, *self.further_samples)

    @property
    def completed(self) -> bool:
        """Whether generation has finished."""
        return self.finish_reason is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was generated."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was generated."""
        return self._text.stop_string

    @property
    def has_end_token(self) -> bool:
        """Whether the last token is an end token, which is no part of the text."""
        return self._end_tokens > 0

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        return self._text.read(self._text_ids, ended=self._has_ended)

    def take(self) -> str:
        """Return the text that was added since the last call."""
        return self._text.take(self._text_ids, ended=self._has_ended)

    def take_whole(self) -> tuple[str, list[Span]]:
        """As :meth:`take`, with special tokens, and their places in the text."""
        return self._text.take_whole(self._text_ids, ended=self._has_ended)

    def _text_ids(self, start: int) -> list[int]:
        """Return the tokens from ``start`` on that are part of the text."""
        return self.token_ids[start : len(self.token_ids) - self._end_tokens]

    def resume(self, output_ids: Sequence[int]) -> None:
        """Begin after tokens that another engine has generated; see ``Request``."""
        self.request.resume(output_ids)
        self.token_ids += output_ids
        self.resumed_tokens = len(output_ids)

    def apply_event(self, event: Event, now: float) -> bool:
        """Apply a token, the end, or both; return whether generation has finished.

        now: ``perf_counter()`` time of the event.
        """
        _, token, reason, _ = event
        if (
            token is not None
            and reason is None
            and self.listener is None
            and self.token_ids
            and not (self._scans_text and self._text.may_stop(token))
        ):
            # Nearly all events of a large batch.
            self.token_ids.append(token)
            self.seconds = now - self._started
            return False
        if self._is_empty and token is not None:
            token, reason = None, "length"
        if token is not None:
            if not self.token_ids:
                self.first_token_seconds = now - self._started
            guide = self.request.guide
            ended_by_token = guide is None or not guide.is_complete
            if reason == "stop" and ended_by_token:
                self._end_tokens = 1
            self.token_ids.append(token)
        if reason is not None:
            self._has_ended = True
        stopped = False
        if self._scans_text:
            self._text.update(self._text_ids, ended=self._has_ended)
            stopped = self.stopped
        self.seconds = now - self._started
        # Set last: other threads read the other fields once it is set.
        if stopped:
            self.finish_reason = "stop"
        elif reason is not None:
            self.error = event.error
            self.finish_reason = reason
        if self.finish_reason is not None:
            self.adapter_use = None
        if self.listener is not None:
            self.listener()
        return self.finish_reason is not None

    def catch_up(self) -> None:
        """Apply the events of the request that an exception has kept from arriving."""
        request, now = self.request, perf_counter()
        for token in request.output_ids[len(self.token_ids) :]:
            if not self.completed:
                reason: FinishReason | None = (
                    "stop" if token in request.end_ids else None
                )
                self.apply_event(Event(request.id, token, reason), now)
        if self.completed:
            self.notify()
        else:
            last = Event(request.id, None, request.finish_reason, request.error)
            self.apply_event(last, now)

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Finish without a further token."""
        event = Event(self.request.id, None, reason, error)
        self.apply_event(event, perf_counter())

    def notify(self) -> None:
        """Call the listener."""
        if self.listener is not None:
            self.listener()

    def fail(self, error: BaseException) -> None:
        """Finish with an error, unless finished already."""
        if not self.completed:
            self._has_ended = True
            self.error = error
            self.finish_reason = "error"
            self.adapter_use = None
            self.notify()

    def cancel(self) -> None:
        """End the request, and its further samples, with the output so far.

        Does nothing to those that have finished. If another thread is computing a step,
        they end after it.
        """
        assert self.dispatcher is not None, "an engine has made it"
        self.dispatcher.cancel(self.samples)

    def result(self, timeout: float | None = None) -> Completion:
        """Step the engine until the request has finished; return its output.

        With ``n`` above 1, until all samples have. timeout: seconds after which
        :class:`TimeoutError` is raised, at the end of a step; the request goes on, and
        a later call may return it. Raises as :meth:`completion`.
        """
        assert self.dispatcher is not None, "an engine has made it"
        last = math.inf if timeout is None else perf_counter() + timeout
        while not all(each.completed for each in self.samples):
            if perf_counter() >= last:
                raise TimeoutError(
                    f"result: the request has not finished after {timeout} s; it goes "
                    "on, call result() again or cancel()"
                )
            if self.request.id:
                self.dispatcher.step()
            else:
                sleep(QUEUE_SECONDS)  # the background thread will queue it
        return self.completion()

    def completion(self) -> Completion:
        """Return the output of a finished request.

        Raises the error that it finished with: :class:`~inl.errors.RequestError` and
        :class:`~inl.errors.NonFiniteLogits` as they are, any other as a
        :class:`~inl.errors.RunnerError` caused by it.
        """
        if isinstance(self.error, RequestError | NonFiniteLogits):
            raise self.error
        if self.error is not None:
            kind = type(self.error)
            raise (kind if issubclass(kind, RunnerError) else RunnerError)(
                f"generation failed: {message(self.error)}"
            ) from self.error
        assert self.finish_reason is not None, "completion() of an unfinished request"
        request = self.request
        logprobs = request.token_logprobs[: len(self.token_ids)]
        scored = request.prompt_logprobs is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            first_token_seconds=self.first_token_seconds,
            seconds=self.seconds,
            logprobs=None if request.logprobs is None else tuple(logprobs),
            seed=request.seed,
            prompt_logprobs=tuple(request.prompt_token_logprobs) if scored else None,
            alternatives=tuple(each.completion() for each in self.further_samples),
        )
