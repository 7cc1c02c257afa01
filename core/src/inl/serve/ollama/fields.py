"""Request fields that ``/api/chat`` and ``/api/generate`` share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from inl.engine.answers.forced_call import ANY_OBJECT
from inl.engine.options import GenerationOptions
from inl.guidance.closed_schemas import close_objects
from inl.serve.absent_fields import Defaults
from inl.serve.api_error import ApiError, unsupported
from inl.serve.openai.fields import MinP, Penalty, Repetition, Seed, TopLogprobs
from inl.serve.sampling import (
    LEAST_TOP_P,
    StopString,
    Temperature,
    TopK,
    optional_options,
)

LATEST = ":latest"
"""Tag of a model's name that stands for none."""

TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
"""Ollama's defaults."""

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)"
DURATION = re.compile(rf"[-+]?(({PART})+|\d+\.?\d*)", re.ASCII)

T = TypeVar("T")
Any32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
One = Annotated[float, Meta(ge=1, le=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
KeepAlive = str | float


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Model parameters.

    Those of loading, such as ``num_gpu`` and ``num_ctx``, have no effect: the server's
    own settings hold. Samplers that INL lacks are accepted where they are off.
    """

    num_predict: Any32 | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: str | list[StopString] | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Any32 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    penalize_newline: bool | None = None
    typical_p: One | None = None
    tfs_z: One | None = None
    mirostat: Annotated[int, Meta(ge=0, le=0)] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_ctx: Any32 | None = None
    num_keep: Any32 | None = None
    num_batch: Any32 | None = None
    num_gpu: Any32 | None = None
    main_gpu: Any32 | None = None
    num_thread: Any32 | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None


DEFAULTS: Defaults = {"tool_choice": ("auto",)}
"""Fields of clients, with the value that asks for what happens anyway."""


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both endpoints; ``keep_alive`` and ``truncate`` have no effect.

    temperature, top_p, max_output_tokens: where ``options`` has none. Ollama does not
    have them; its provider for the AI SDK sends them here.
    """

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    max_output_tokens: Any32 | None = None
    keep_alive: KeepAlive | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: bool | None = None
    shift: bool | None = None


def served_name(name: str | None) -> str | None:
    """Return the name of a model without the tag that stands for none."""
    return name and name.removesuffix(LATEST)


def options_of(fields: GenerationFields) -> GenerationOptions:
    """Return the engine's options; raises :class:`ApiError`."""
    given = fields.options or Options()
    temperature = _first(given.temperature, fields.temperature, TEMPERATURE)
    top_p = _first(given.top_p, fields.top_p, TOP_P)
    limit = _first(given.num_predict, fields.max_output_tokens, -1)
    options: GenerationOptions = {
        **optional_options(given),
        "temperature": temperature,
        "top_k": TOP_K if given.top_k is None else max(given.top_k, 0),
        "top_p": max(top_p, LEAST_TOP_P),
        "stop": given.stop or None,
    }
    if limit > 0:
        options["max_tokens"] = limit
    if given.seed is not None and given.seed != -1:
        options["seed"] = given.seed
    if given.repeat_penalty not in (None, 1) and given.repeat_last_n != 0:
        options["repetition_penalty"] = _repetition(given)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise unsupported("top_logprobs", "needs logprobs to be true")
    if fields.logprobs:
        options["logprobs"] = fields.top_logprobs or 0
    return options


def _first(*values: T | None) -> T:
    """Return the first value that is given; the last one is."""
    return next(value for value in values if value is not None)


def _repetition(options: Options) -> float:
    """Return the penalty of all tokens of prompt and answer."""
    assert options.repeat_penalty is not None, "by the caller"
    if options.repeat_last_n not in (None, -1):
        raise unsupported(
            "options.repeat_last_n",
            f"found {options.repeat_last_n}; with repeat_penalty accepts -1, the whole "
            "context, or 0, no penalty",
        )
    if options.penalize_newline is False:
        raise unsupported(
            "options.penalize_newline", "found false; with repeat_penalty accepts true"
        )
    return options.repeat_penalty


def structure_of(fields: GenerationFields) -> dict[str, Any] | None:
    """Return the engine's option ``structured``."""
    if not fields.format and not isinstance(fields.format, dict):
        return None
    if fields.format == "json":
        return {"json_schema": ANY_OBJECT}
    # pydantic's schemas, which its documentation shows, are silent about other names.
    return {"json_schema": close_objects(fields.format)}


def variables_of(fields: GenerationFields) -> dict[str, Any]:
    """Return the template variables of ``think``."""
    think = fields.think
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    return {"enable_thinking": True, "reasoning_effort": think}


def seconds_of(duration: KeepAlive | None) -> float | None:
    """Return the seconds of a duration such as "5m"; raises :class:`ApiError`."""
    if duration is None or not isinstance(duration, str):
        return duration
    if not DURATION.fullmatch(duration):
        raise ApiError(
            400,
            f"keep_alive: found {duration!r:.40}, accepts seconds, or a text such as "
            "'5m' or '1h30m'",
            param="keep_alive",
            code="invalid_value",
        )
    parts = re.findall(PART, duration, re.ASCII)
    total = sum(float(number) * SECONDS[unit] for number, unit in parts)
    total = total if parts else float(duration.lstrip("+-"))
    return -total if duration.startswith("-") else total


def with_images(
    text: str, images: Sequence[str] | None, where: str
) -> str | list[dict[str, Any]]:
    """Return the content of a message: its images, in base64, and its text behind.

    Raises :class:`ApiError` for what is not base64.
    """
    if not images:
        return text
    for at, image in enumerate(images):
        if not BASE64.fullmatch(image, 0, 256):
            raise unsupported(f"{where}[{at}]", "found no base64, accepts a file in it")
    parts = [
        {"type": "image", "image": f"data:image/*;base64,{image}"} for image in images
    ]
    return [*parts, {"type": "text", "text": text}]
