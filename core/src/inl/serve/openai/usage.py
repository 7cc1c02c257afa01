"""Usage and log-probabilities as OpenAI's dialects report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from inl.serve.event_stream import encode
from inl.serve.token_texts import token_name

if TYPE_CHECKING:
    from inl.engine.request_handle import TokenLogprob
    from inl.serve.job import Usage
    from inl.serve.token_texts import TokenPlaces, TokenTexts

# Each token's entry is encoded by itself: thousands of them would be a million objects,
# which the garbage collector visits, and which one call would encode with all threads
# waiting.

LEAST_LOGPROB = -9999.0
"""Reported instead of negative infinity, which JSON cannot represent."""


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the ``usage`` object of chat and text completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chat_logprobs(
    logprobs: Sequence[TokenLogprob], places: TokenPlaces
) -> list[msgspec.Raw]:
    """Return one encoded entry per token, with its alternatives.

    The bytes of all entries join to the text: special tokens have none.
    """
    entries = []
    for each in logprobs:
        top = [_entry(token, value, places) for token, value in each.top]
        entry = _entry(each.token, each.logprob, places)
        entries.append(_encoded({**entry, "top_logprobs": top}))
        places.add(each.token)
    return entries


def _entry(token: int, logprob: float, places: TokenPlaces) -> dict[str, Any]:
    data = places.data(token)
    return {
        "token": token_name(data),
        "logprob": _finite(logprob),
        "bytes": list(data) if places.is_shown(token) else [],
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob | None] | None, text: TokenTexts
) -> list[msgspec.Raw | None] | None:
    """Return one encoded object by token id for each token of a prompt, as vLLM does.

    The first token has none. ``rank`` is ``None`` for a token that is not among the
    most likely ones that were asked for.
    """
    if logprobs is None:
        return None
    return [
        None if each is None else _encoded(_ranked(each, text)) for each in logprobs
    ]


def _ranked(each: TokenLogprob, text: TokenTexts) -> dict[str, Any]:
    ranks = {token: at for at, (token, _) in enumerate(each.top, 1)}
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": ranks.get(token),
            "decoded_token": token_name(text(token)),
        }
        for token, value in ((each.token, each.logprob), *each.top)
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | int],
    places: TokenPlaces,
    is_shown: Callable[[int], bool | None] = lambda _: None,
) -> dict[str, list[Any]]:
    """Return the parallel lists of text completions, each ``top_logprobs`` encoded.

    logprobs: an entry for each token; a token id has no log-probability. is_shown:
    whether a token is part of the text, ``None``: as in an answer.
    """
    found: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for each in logprobs:
        if isinstance(each, int):
            token, logprob, top = each, None, None
        else:
            token, logprob = each.token, _finite(each.logprob)
            top = _encoded(
                {
                    token_name(places.data(other)): _finite(value)
                    for other, value in each.top
                }
            )
        found["tokens"].append(token_name(places.data(token)))
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(places.add(token, is_shown=is_shown(token)))
    return found


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def _finite(logprob: float) -> float:
    """Return a value that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)
