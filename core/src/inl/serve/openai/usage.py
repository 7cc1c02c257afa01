"""Usage and log-probabilities as OpenAI's dialects report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.engine.request_handle import TokenLogprob
    from inl.serve.dialect import TokenText
    from inl.serve.job import Usage

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
    logprobs: Sequence[TokenLogprob], text: TokenText
) -> list[dict[str, Any]]:
    """Return one entry per token, with its alternatives."""
    return [
        {
            **_entry(each.token, each.logprob, text),
            "top_logprobs": [_entry(token, value, text) for token, value in each.top],
        }
        for each in logprobs
    ]


def _entry(token: int, logprob: float, text: TokenText) -> dict[str, Any]:
    data = text(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob | None] | None, text: TokenText
) -> list[dict[str, Any] | None] | None:
    """Return one object by token id for each token of a prompt, as vLLM does.

    The first token has none. ``rank`` is ``None`` for a token that is not among the
    most likely ones that were asked for.
    """
    if logprobs is None:
        return None
    return [None if each is None else _ranked(each, text) for each in logprobs]


def _ranked(each: TokenLogprob, text: TokenText) -> dict[str, Any]:
    ranks = {token: at for at, (token, _) in enumerate(each.top, 1)}
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": ranks.get(token),
            "decoded_token": _text(token, text),
        }
        for token, value in ((each.token, each.logprob), *each.top)
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | int], text: TokenText, offset: int
) -> dict[str, Any]:
    """Return the parallel lists of text completions.

    logprobs: an entry for each token; a token id has no log-probability. offset: of
    the first token in the text.
    """
    found: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for each in logprobs:
        if isinstance(each, int):
            token, logprob, top = _text(each, text), None, None
        else:
            token, logprob = _text(each.token, text), _finite(each.logprob)
            top = {_text(other, text): _finite(value) for other, value in each.top}
        found["tokens"].append(token)
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(offset)
        offset += len(token)
    return found


def _text(token: int, text: TokenText) -> str:
    return text(token).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """Return a value that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)
