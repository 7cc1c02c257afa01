"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Any

from msgspec import Meta

from inl.serve.api_error import unsupported
from inl.serve.dialect import ReadUsage, parse
from inl.serve.job import Answer, Delta, Gap, Job, Prompt, Usage
from inl.serve.openai.chunks import ChunkedExchange
from inl.serve.openai.fields import (
    DEFAULTS,
    FINISH_REASONS,
    GenerationFields,
    TokenId,
    TopLogprobs,
    check_stream_options,
    options_of,
    structure_of_fields,
)
from inl.serve.openai.usage import completion_logprobs, prompt_logprobs, usage_body
from inl.serve.token_texts import NoTokenTexts, TokenPlaces, TokenTexts

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""

Text = Annotated[str, Meta(min_length=1)]
Tokens = Annotated[list[TokenId], Meta(min_length=1)]
Many = Meta(min_length=1)

MOST_PROMPTS = 2048
"""Prompts of a request; one of token ids may have more of them."""


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a text completion."""

    prompt: Text | Annotated[list[str | TokenId | Tokens], Many]
    logprobs: TopLogprobs | None = None
    echo: bool | None = False
    suffix: str | None = None


def prompts_of(
    prompt: str | list[str | int | list[int]],
) -> list[str | list[int]]:
    """Return the prompts of a request; raises :class:`ApiError` for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > MOST_PROMPTS:
        raise unsupported(
            "prompt", f"found {len(prompt)} prompts, accepts up to {MOST_PROMPTS}"
        )
    texts = [item for item in prompt if isinstance(item, str) and item]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise unsupported(
            "prompt", "accepts a text, token ids, or a list of either, none empty"
        )
    return [*texts, *lists]


def _with_suffix(
    prompts: Sequence[str | list[int]], suffix: str | None
) -> Sequence[Prompt]:
    """Return prompts whose completions end before a suffix, if there is one."""
    if not suffix:
        return prompts
    texts = [Gap(prompt, suffix) for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise unsupported("suffix", "accepts a prompt of text beside it")
    return texts


class CompletionExchange(ChunkedExchange):
    """A text completion, of one or several prompts."""

    chunk_object = "text_completion"

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, CompletionRequest, DEFAULTS)
        self.stream_options = check_stream_options(request)
        options = options_of(request)
        if request.max_tokens is None:
            options["max_tokens"] = DEFAULT_MAX_TOKENS
        options["logprobs"] = request.logprobs
        if request.echo and request.logprobs is not None:
            if request.stream:
                raise unsupported("echo", "with logprobs is not supported in a stream")
            options["prompt_logprobs"] = request.logprobs
        if request.suffix and request.echo:
            raise unsupported("echo", "is not supported together with suffix")
        self._has_prompt_logprobs = request.prompt_logprobs is not None
        self.job = Job(
            model=request.model,
            prompts=_with_suffix(prompts_of(request.prompt), request.suffix),
            options=options,
            count=request.n or 1,
            stream=bool(request.stream),
            structure=structure_of_fields(request),
            number=number,
        )
        self._echo = bool(request.echo)
        self._has_logprobs = request.logprobs is not None
        self._has_token_ids = bool(request.return_token_ids)
        self.token_text: TokenTexts = NoTokenTexts()
        self._places: dict[int, TokenPlaces] = {}
        self.begin(
            {
                "id": f"cmpl-{number}",
                "object": self.chunk_object,
                "created": int(time.time()),
                "model": request.model or model,
            }
        )

    def _places_of(self, index: int) -> TokenPlaces:
        places = self._places.get(index)
        if places is None:
            skip_special = self.job.options["skip_special_tokens"]
            places = TokenPlaces(self.token_text, skip_special=skip_special)
            self._places[index] = places
        return places

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""
        choices = [
            self._choice(index, self._echoed(index) + answer.content, answer)
            for index, answer in enumerate(answers)
        ]
        return {**self.head, "choices": choices, "usage": usage_body(usage)}

    def _echoed(self, index: int) -> str:
        """Return the text of the prompt, if it is part of the completion."""
        if not self._echo:
            return ""
        prompt = self.job.prompts[index // self.job.count]
        if isinstance(prompt, list):
            return self._text_of(prompt)
        assert isinstance(prompt, str), "conversations are not completed here"
        return prompt

    def _choice(self, index: int, text: str, part: Answer | Delta) -> dict[str, Any]:
        reason = part.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason and FINISH_REASONS[reason],
        }
        if self._has_logprobs:
            choice["logprobs"] = self._logprobs(index, part)
        if self._has_prompt_logprobs and part.prompt is not None:
            scores = part.prompt.logprobs
            choice["prompt_logprobs"] = prompt_logprobs(scores, self.token_text)
        if self._has_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _text_of(self, prompt: list[int]) -> str:
        """Return the text of a prompt of token ids, special ones included."""
        places, data = TokenPlaces(self.token_text, skip_special=False), b""
        for token in prompt:
            data += places.data(token)
            places.add(token)
        return data.decode("utf-8", "replace")

    def _logprobs(self, index: int, part: Answer | Delta) -> dict[str, list[Any]]:
        places = self._places_of(index)
        if not self._echo or part.prompt is None:
            return completion_logprobs(part.logprobs, places)
        # Tokens before the first one with a log-probability are ids.
        known = [
            scores or token
            for token, scores in zip_longest(
                part.prompt.token_ids, part.prompt.logprobs
            )
        ]
        text = self._echoed(index)

        def is_shown(token: int) -> bool:
            """Whether the client wrote it: a tokenizer adds some."""
            name = self.token_text(token).decode("utf-8", "replace")
            special = self.token_text.is_special(token)
            return not special or text.startswith(name, places.offset)

        echoed = completion_logprobs(known, places, is_shown)
        places.offset = len(text)
        places.begin()
        found = completion_logprobs(part.logprobs, places)
        return {name: echoed[name] + values for name, values in found.items()}

    def opening(self, usage: Usage) -> bytes:
        """Return the prompts, if they are part of the completions."""
        return b"".join(
            self._chunk(index, text, Delta(), lambda: usage)
            for index in range(self.job.completions)
            if (text := self._echoed(index))
        )

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the chunk of a delta."""
        shown = delta.content or delta.finish_reason or delta.logprobs
        if not (shown or self._has_token_ids):
            return b""
        return self._chunk(index, delta.content, delta, usage)

    def _chunk(self, index: int, text: str, delta: Delta, usage: ReadUsage) -> bytes:
        return self.chunk(self._choice(index, text, delta), usage)
