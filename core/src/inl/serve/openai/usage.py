"""Usage and log-probabilities as OpenAI's dialects report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.scheduling.sampling_params import TokenLogprob
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
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], text: TokenText, offset: int
) -> dict[str, Any]:
    """Return the parallel lists of text completions; offset: of the first token."""
    tokens = [text(each.token).decode("utf-8", "replace") for each in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(each.logprob, LEAST_LOGPROB) for each in logprobs],
        "top_logprobs": [
            {
                text(token).decode("utf-8", "replace"): max(value, LEAST_LOGPROB)
                for token, value in each.top
            }
            for each in logprobs
        ],
        "text_offset": offsets,
    }
