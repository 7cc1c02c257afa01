"""``/infill``: fills a gap in a text, with the fields of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inl.engine.options import GenerationOptions
from inl.serve.absent_fields import Defaults
from inl.serve.api_error import ApiError
from inl.serve.dialect import ReadUsage, parse
from inl.serve.event_stream import EVENTS, event
from inl.serve.job import Answer, Delta, Gap, Job, Usage
from inl.serve.openai.fields import MinP, Penalty, Repetition, Seed
from inl.serve.sampling import LEAST_TOP_P, StopString, Temperature, TopK
from inl.serve.token_texts import NoTokenTexts, TokenTexts

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05
"""llama.cpp's defaults."""

FILE_NAME = "tmp"
"""llama.cpp's name of a file without one."""

DEFAULTS: Defaults = {
    "n_probs": (0,),
    "n_keep": (0, -1),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "n_cmpl": (1,),
    "return_tokens": (False,),
    "logit_bias": ([],),
    "lora": ([],),
}
"""Fields that are not supported, with the values that ask for nothing."""

STOP_TYPES = {"stop": "eos", "stop_string": "word", "length": "limit"}


ResponseFields = Annotated[
    list[Annotated[str, Meta(max_length=256)]], Meta(max_length=64)
]


class OtherFile(msgspec.Struct, kw_only=True):
    """A part of another file."""

    text: str = ""
    filename: str = FILE_NAME


class InfillRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/infill``. The fields after ``stream`` have no effect here."""

    input_prefix: str
    input_suffix: str
    input_extra: list[OtherFile] | None = None
    prompt: str | None = None
    model: str | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopString | list[StopString] | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    response_fields: ResponseFields | None = None
    stream: bool | None = False
    id_slot: int | None = None
    n_indent: int | None = None
    cache_prompt: bool | None = None
    samplers: list[str] | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None


def _options_of(request: InfillRequest) -> GenerationOptions:
    def default(value: float | None, other: float) -> float:
        return other if value is None else value

    count, seed = request.n_predict, request.seed
    options: GenerationOptions = {
        "temperature": default(request.temperature, TEMPERATURE),
        "top_k": max(int(default(request.top_k, TOP_K)), 0),
        "top_p": max(default(request.top_p, TOP_P), LEAST_TOP_P),
        "min_p": default(request.min_p, MIN_P),
        "repetition_penalty": default(request.repeat_penalty, 1.0),
        "presence_penalty": default(request.presence_penalty, 0.0),
        "frequency_penalty": default(request.frequency_penalty, 0.0),
        "max_tokens": None if count in (None, -1) else count,
        "seed": None if seed == -1 else seed,
        "stop": request.stop or None,
        "ignore_eos": bool(request.ignore_eos),
    }
    return options


class InfillExchange:
    """One filled gap."""

    stream_format = EVENTS

    def __init__(self, body: bytes, number: str, model: str) -> None:
        request = parse(body, InfillRequest, DEFAULTS)
        files = [(each.filename, each.text) for each in request.input_extra or ()]
        prefix = request.input_prefix + (request.prompt or "")
        self.job = Job(
            model=request.model,
            prompts=[Gap(prefix, request.input_suffix, files)],
            options=_options_of(request),
            stream=bool(request.stream),
            number=number,
        )
        self.token_text: TokenTexts = NoTokenTexts()
        self._fields = request.response_fields
        self._model = request.model or model

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response, or those of its fields that are asked for."""
        (answer,) = answers
        return _chosen(self._last(answer, answer.content, usage), self._fields)

    def _last(self, answer: Answer, content: str, usage: Usage) -> dict[str, Any]:
        return {
            **self._part(content, usage),
            "stop": True,
            "model": self._model,
            "has_new_line": "\n" in answer.content,
            "truncated": False,
            "stop_type": STOP_TYPES[answer.finish_reason],
            "stopping_word": answer.stop_string or "",
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "timings": _timings(answer, usage),
        }

    def _part(self, content: str, usage: Usage) -> dict[str, Any]:
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
        }

    def opening(self, usage: Usage) -> bytes:
        """Return nothing: the first event is that of the first text."""
        del usage
        return b""

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the event of a delta."""
        del index
        return event(self._part(delta.content, usage())) if delta.content else b""

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the last event, without text."""
        (answer,) = answers
        return event(_chosen(self._last(answer, "", usage), self._fields))

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        return event(error.openai())


def _timings(answer: Answer, usage: Usage) -> dict[str, Any]:
    """Return the times of prompt and answer, in milliseconds."""
    began = answer.began or answer.ended
    computed = usage.prompt_tokens - usage.cached_tokens
    prompt = (began - answer.submitted) * 1e3
    predicted = (answer.ended - began) * 1e3
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", computed, prompt),
        **_rates("predicted", usage.completion_tokens, predicted),
    }


def _rates(name: str, count: int, milliseconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(count, 1),
        f"{name}_per_second": count / max(milliseconds / 1e3, 1e-9),
    }


def _chosen(body: dict[str, Any], paths: Sequence[str] | None) -> dict[str, Any]:
    """Return the values at paths such as "timings/prompt_n", by path."""
    if not paths:
        return body
    found = {}
    for path in paths:
        value: Any = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
