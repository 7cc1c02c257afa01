"""Checks of a request against the limits of a runner."""

from __future__ import annotations

from inl.errors import PromptTooLong, RequestError
from inl.scheduling.request import Request
from inl.scheduling.sampling_params import rank
from inl.spec.step import PARAMS


def check_request(request: Request, vocab: int, context: int, *, sampler: str) -> None:
    """Raise if a runner of this vocabulary and context cannot serve ``request``.

    sampler: the costliest of :data:`~inl.spec.step.SAMPLERS` that it has programs for.
    Raises :class:`~inl.errors.PromptTooLong` and :class:`~inl.errors.RequestError`.
    """
    if request.prompt_tokens >= context:
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
    if rank(request.sampler) > rank(sampler):
        raise RequestError(
            f"{_costly_options(request)}: the engine was started with "
            f'sampling="{sampler}"; leave it out, or start with '
            f'EngineConfig(sampling="{request.sampler}")'
        )


def _costly_options(request: Request) -> str:
    """Name the options that need the request's sampler, with their values."""
    if request.sampler == "sample":
        return f"temperature: found {request.temperature}"
    names = (*PARAMS[1:], "logit_bias", "logprobs")
    defaults = {name: Request.__dataclass_fields__[name].default for name in names}
    defaults["logit_bias"] = {}
    values = {name: getattr(request, name) for name in names}
    return ", ".join(
        f"{name}: found {value}"
        for name, value in values.items()
        if value != defaults[name]
    )
