"""Appends sampled tokens to requests with a grammar, and the tokens it forces."""

from __future__ import annotations

from collections.abc import Callable

from inl.errors import RequestError
from inl.scheduling.guide import Guide
from inl.scheduling.request import Event, FinishReason, Request, Status

Append = Callable[[Request, int], Event]
Finish = Callable[[Request, FinishReason, Exception | None], Event]


def append_guided(
    request: Request,
    guide: Guide,
    token: int,
    *,
    append: Append,
    finish: Finish,
    skips: bool,
) -> list[Event]:
    """Append a token, and with ``skips`` those that the grammar forces after it.

    append, finish: as the scheduler does for any request. Forced tokens are computed
    together in the next step, as a prompt is.
    """
    events = [append(request, token)]
    try:
        while events[-1].finish_reason is None:
            guide.advance(request.tokens[-1])
            if guide.is_complete:
                _end(events, request, finish(request, "stop", None))
            elif skips and guide.forced:
                events.append(append(request, guide.forced[0]))
            else:
                break
        else:
            _complete(events, request, guide)
    except RequestError as error:
        if request.status is not Status.FINISHED:
            _end(events, request, finish(request, "error", error))
    if len(events) > 1 and request.status is Status.RUNNING:
        request.prefill_len = request.host_token_count = len(request.tokens)
    return events


def _complete(events: list[Event], request: Request, guide: Guide) -> None:
    """Report an output that is complete with the last token of its limit."""
    if events[-1].finish_reason == "length":
        guide.advance(request.tokens[-1])
        if guide.is_complete:
            request.finish_reason = "stop"
            events[-1] = events[-1]._replace(finish_reason="stop")


def _end(events: list[Event], request: Request, end: Event) -> None:
    events[-1] = end._replace(token=request.tokens[-1])


def skips_forced(request: Request) -> bool:
    """Whether forced tokens are appended without being sampled.

    Penalties count sampled tokens, log-probabilities belong to them, and
    ``allowed_token_ids`` may exclude a forced one.
    """
    sampled = request.logprobs is not None or request.token_mask is not None
    return not (sampled or request.has_penalties)
