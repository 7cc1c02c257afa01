"""Request fields that chat and text completions share."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from inl.engine.options import GenerationOptions
from inl.serve.absent_fields import Defaults
from inl.serve.api_error import unsupported
from inl.serve.sampling import (
    StopString,
    Temperature,
    TopK,
    TopP,
    optional_options,
    sampling_options,
)
from inl.serve.structured import guided_of, structure_of

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-1e9, le=1e9)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Completions = Annotated[int, Meta(ge=1, le=128)]


DEFAULTS: Defaults = {
    "function_call": ("none",),
    "functions": ([],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "add_special_tokens": (True,),
    "cache_prompt": (True,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "include_reasoning": (True,),
}
"""Fields of other servers and their defaults, which ask for what happens anyway."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling fields, and fields that have no effect here."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Completions | None = 1
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    bad_words: list[StopString] | None = None
    seed: Seed | None = None
    prompt_logprobs: TopLogprobs | None = None
    prompt_logprobs_start: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    cache_salt: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    return_token_ids: bool | None = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def options_of(fields: GenerationFields) -> GenerationOptions:
    """Return the engine's options; raises :class:`ApiError`."""
    options: GenerationOptions = {
        **sampling_options(fields),
        **optional_options(fields),
        "max_tokens": fields.max_tokens,
        "seed": fields.seed,
        "stop": fields.stop,
        "stop_ids": fields.stop_token_ids or (),
        "skip_special_tokens": fields.skip_special_tokens is not False,
        "ignore_eos": bool(fields.ignore_eos),
        "cache_salt": fields.cache_salt,
        "logit_bias": fields.logit_bias,
        "allowed_token_ids": fields.allowed_token_ids,
        "min_tokens": fields.min_tokens or 0,
        "bad_words": fields.bad_words or (),
        "prompt_logprobs": fields.prompt_logprobs,
        "prompt_logprobs_start": fields.prompt_logprobs_start or 0,
        # Lower values start first, as in vLLM.
        "priority": -(fields.priority or 0),
    }
    if fields.prompt_logprobs is not None and fields.stream:
        raise unsupported("prompt_logprobs", "is not supported together with stream")
    if fields.timeout_seconds is not None:
        options["deadline"] = time.time() + fields.timeout_seconds
    if fields.repetition_penalty is not None:
        options["repetition_penalty"] = fields.repetition_penalty
    return options


def structure_of_fields(fields: GenerationFields) -> dict[str, Any] | None:
    """Return the engine's option ``structured``; raises :class:`ApiError`."""
    guided = guided_of(fields)
    # guidance sends one structure in both, for older and newer servers.
    if guided and fields.structured_outputs not in (None, guided):
        raise unsupported(f"guided_{min(guided)}", "differs from structured_outputs")
    return structure_of(fields.response_format, guided or fields.structured_outputs)


def check_stream_options(fields: GenerationFields) -> StreamOptions:
    """Return the stream options; raises :class:`ApiError` without ``stream``."""
    if fields.stream_options is not None and not fields.stream:
        raise unsupported("stream_options", "needs stream to be true")
    return fields.stream_options or StreamOptions()


FINISH_REASONS: dict[str, Literal["stop", "length", "tool_calls"]] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
