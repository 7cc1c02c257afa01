"""Checks of a request against the limits of a runner."""

from __future__ import annotations

from collections.abc import Mapping

from inl.errors import PromptTooLong, QueueFull, RequestError
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.sampling_params import rank
from inl.scheduling.waiting_queue import WaitingQueue
from inl.spec.step import PARAMS


def check_request(
    request: Request, vocab: int, context: int, *, sampler: str, use_kv_cache: bool
) -> None:
    """Raise if a runner of this vocabulary and context cannot serve ``request``.

    sampler: the costliest of :data:`~inl.spec.step.SAMPLERS` that it has programs for.
    Raises :class:`~inl.errors.PromptTooLong` and :class:`~inl.errors.RequestError`.
    """
    if request.prompt_tokens >= context + request.pooled:
        raise PromptTooLong(
            f"prompt: found {request.prompt_tokens} tokens, accepts at most "
            f"{context - 1}: the context holds {context}, output included"
        )
    highest = int(request.prompt_array.max())
    if highest >= vocab:
        raise RequestError(
            f"prompt[{request.tokens.index(highest)}]: found token {highest}, "
            f"the vocabulary is 0 to {vocab - 1}"
        )
    for name in ("logit_bias", "allowed_token_ids"):
        token = max(getattr(request, name) or (), default=0)
        if token >= vocab:
            raise RequestError(
                f"{name}: found token {token}, the vocabulary is 0 to {vocab - 1}"
            )
    if request.prompt_logprobs is not None and not use_kv_cache:
        raise RequestError(
            f"prompt_logprobs: found {request.prompt_logprobs} with "
            "use_kv_cache=False, accepts None there"
        )
    if rank(request.sampler) > rank(sampler):
        raise RequestError(
            f"{_costly_options(request)}: the engine was started with "
            f'sampling="{sampler}"; leave it out, or start with '
            f'EngineConfig(sampling="{request.sampler}")'
        )


def check_embeddings(request: Request, width: int) -> None:
    """Raise :class:`~inl.errors.RequestError` for rows that the runner does not take.

    width: ``Limits.embedding``.
    """
    if request.embeddings is None or request.embeddings.width == width:
        return
    accepted = f"rows of {width}, the hidden size" if width else "token ids only"
    raise RequestError(
        f"prompt: found embeddings of {request.embeddings.width}, this model accepts "
        f"{accepted}"
    )


def check_spans(request: Request, tokens: int, rows: int) -> None:
    """Raise :class:`~inl.errors.RequestError` for a span that may never fit a step.

    tokens, rows: most of a step, in which every other row may decode.
    """
    longest = request.longest_span
    if longest > tokens - rows + 1:
        raise RequestError(
            f"prompt: found {longest} tokens that attend to each other in both "
            f"directions, accepts {tokens - rows + 1} (token_budget {tokens} without "
            f"a token of each other of {rows} rows); raise token_budget"
        )


def check_adapter(request: Request, loaded: Mapping[int, str]) -> None:
    """Raise :class:`~inl.errors.RequestError` unless its adapter is loaded.

    loaded: digest of each adapter, by number.
    """
    if request.adapter and loaded.get(request.adapter) != request.adapter_digest:
        raise RequestError(
            f"adapter: number {request.adapter} is not loaded, or has been replaced "
            "since the request was made; load it and make the request again"
        )


def check_room(waiting: WaitingQueue, tokens: int, config: SchedulerConfig) -> None:
    """Raise :class:`~inl.errors.QueueFull` if ``tokens`` more cannot wait.

    An empty queue accepts a prompt of any length.
    """
    most, most_tokens = config.max_queued_requests, config.max_queued_tokens
    if most is not None and len(waiting) >= most:
        raise QueueFull(
            f"queue: {len(waiting)} requests wait, accepts {most} "
            "(max_queued_requests); try again later"
        )
    if most_tokens is None or not len(waiting):
        return
    if waiting.tokens + tokens > most_tokens:
        raise QueueFull(
            f"queue: {waiting.tokens} tokens wait, found a prompt of {tokens} more, "
            f"accepts {most_tokens} (max_queued_tokens); try again later"
        )


def _costly_options(request: Request) -> str:
    """Name the options that need the request's sampler, with their values."""
    if request.sampler == "sample":
        return f"temperature: found {request.temperature}"
    names = (*PARAMS[1:], "logit_bias", "logprobs", "prompt_logprobs")
    defaults = {name: Request.__dataclass_fields__[name].default for name in names}
    defaults["logit_bias"] = {}
    values = {name: getattr(request, name) for name in names}
    return ", ".join(
        f"{name}: found {value}"
        for name, value in values.items()
        if value != defaults[name]
    )
