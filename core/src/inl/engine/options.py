"""Generation options, and the accepted forms of prompts and stop strings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypedDict, cast

from inl.config import MAX_COUNT, EngineConfig
from inl.engine.prompt_embeddings import PromptEmbeddings, is_rows
from inl.errors import RequestError
from inl.guidance.structured import StructuredOutput, read_structured
from inl.scheduling.request import Request
from inl.scheduling.token_ids import read_integer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a conversation: messages, which are dicts with "role" and
"content". Among the ids there may be arrays [n, hidden] of embeddings (NumPy, or any
that it converts), each of which stands for n tokens: rows that take the place of the
rows of the model's own table."""


class GenerationOptions(TypedDict, total=False):
    """Options of one request; every field is optional.

    :data:`inl.ops.sample.sample` defines the order in which the sampling options take
    effect; ``logprobs`` are computed before any of them.
    """

    max_tokens: int | None
    """Maximum number of tokens to generate; 0 only scores the prompt, see
    ``prompt_logprobs``. Default: 256, or
    what the context has left if that is less; ``None``: the rest of the context."""
    temperature: float | None
    """Divides the logits. 0 is greedy decoding: ``top_k``, ``top_p`` and ``min_p`` then
    have no effect. Default of this and of the next four: what the model recommends
    (``EngineConfig.generation_config``); where it says nothing, 0."""
    top_k: int | None
    """Sample from the k most likely tokens. Default: the model's, or 0, all tokens."""
    top_p: float | None
    """Sample from the smallest set of most likely tokens whose total probability is at
    least this, 1e-6 to 1. Default: the model's, or 1, all tokens."""
    min_p: float | None
    """Minimum probability of a token relative to the most likely one, 0 to 1. Default:
    the model's, or 0, all tokens."""
    repetition_penalty: float | None
    """Above 1, tokens that prompt or output contain become less likely; below 1, more
    likely; 0.01 to 100. Default: the model's, or 1."""
    presence_penalty: float
    """Subtracted from the logit of each token that the output contains, -2 to 2.
    Default: 0."""
    frequency_penalty: float
    """Subtracted from the logit of each token, times its count in the output, -2 to 2.
    Default: 0."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits, by token id, -1e9 to 1e9; -100 bans a token. Default:
    ``None``."""
    allowed_token_ids: Collection[int] | None
    """The only tokens that may be generated; end tokens only if listed. At least one.
    Default: ``None``, all tokens."""
    logprobs: int | None
    """Report the log-probability of each generated token, and of this many most likely
    tokens, 0 to 20. Default: ``None``, no log-probabilities."""
    seed: int | None
    """Seed of sampling: equal seeds give equal output, in any batch. Default: ``None``,
    a random one, reported as :attr:`~inl.engine.request_handle.Completion.seed`."""
    stop: str | Sequence[str] | None
    """Strings that end the output; the text ends before them. They are also found in
    the text of special tokens. Default: ``None``."""
    skip_special_tokens: bool
    """Whether the text is without special tokens. Default: ``True``."""
    stop_ids: Collection[int]
    """Tokens that end the output, besides the model's own. Default: none."""
    ignore_eos: bool
    """Whether to continue past the model's own end tokens. Default: ``False``."""
    min_tokens: int
    """Minimum number of tokens before one of the end tokens; stop strings end the
    output sooner. Default: 0."""
    bad_words: Collection[str]
    """Strings that the output never has, at the beginning of a word or within one, as
    the tokenizer encodes them. Default: none."""
    cache_salt: str | None
    """Prefix-cache blocks are shared only between requests with equal salts. Default:
    ``None``, shared with all requests that have no salt."""
    adapter: str | None
    """Name of a loaded LoRA adapter. Default: ``None``, the model itself."""
    structured: StructuredOutput | Mapping[str, Any] | type | None
    """A JSON schema, regular expression, grammar or choice that the output matches: a
    dict with the kind, such as ``{"regex": "a+"}``; a JSON schema as it is; or a
    dataclass, a TypedDict or a model of pydantic, whose fields are the schema's.
    Default: ``None``, any text. Needs ``inl-core[guidance]``."""
    n: int
    """Number of completions of the prompt, which is computed once. Completion i is that
    of a request with the seed ``seed + i``. Default: 1."""
    prompt_logprobs: int | None
    """Report the log-probability of each prompt token but the first, and of this many
    most likely tokens, 0 to 20. Default: ``None``, no log-probabilities."""
    prompt_logprobs_start: int
    """The first prompt token of those for ``prompt_logprobs``. Tokens before it have
    none, may come from the prefix cache, and cost what they cost without. Default: 0.
    """
    key: str
    """Whose request it is, such as the hash of an API key: keys with waiting requests
    get equal shares of the computed tokens. Default: ``""``."""
    priority: int
    """Requests of one key with a higher priority start first, -100 to 100; one level is
    worth a head start of 100 arrivals. Default: 0."""
    images: Sequence[Any] | None
    """Images of the prompt, in order: of Pillow, bytes, paths or data URIs. A text has
    one placeholder of the model for each, such as ``<|image_pad|>``, and token ids have
    one for each feature, as :meth:`InferenceEngine.chat_ids` returns them. A
    conversation has its images in its messages instead. Default: none. Needs
    ``inl-core[vision]`` and a model with a vision encoder."""
    deadline: float | None
    """Unix time, as ``time.time()``, at which the request ends with what it has
    generated, also while it waits. Default: ``None``."""


DEFAULT_MAX_TOKENS = 256
"""Most tokens of a request that does not say how many."""


NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling options that a model may recommend, and their values where none does."""


def with_sampling(
    options: Mapping[str, Any], defaults: Mapping[str, float]
) -> dict[str, Any]:
    """Return options with the defaults of those that are absent or ``None``."""
    given = {
        name: value
        for name, value in options.items()
        if value is not None or name not in NEUTRAL_SAMPLING
    }
    return {**defaults, **given}


def make_requests(
    ids: Sequence[int],
    options: GenerationOptions,
    *,
    room: int,
    config: EngineConfig | None = None,
    embeddings: PromptEmbeddings | None = None,
) -> list[Request]:
    """Make the ``n`` requests for a prompt's token ids and its options.

    room: tokens that the context has left. config: bounds of the options.
    embeddings: as :attr:`~inl.scheduling.request.Request.embeddings`.
    ``structured`` is only checked. Raises :class:`~inl.errors.RequestError` for an
    unknown option or a value that is not accepted. Needs no model, so that a command
    can check its options first.
    """
    fields = with_sampling(options, {})
    most = (config or EngineConfig()).max_samples
    count = fields.pop("n", 1)
    if type(count) is not int or not 1 <= count <= most:
        raise RequestError(
            f"n: found {count!r}, accepts 1 to {most} (EngineConfig.max_samples)"
        )
    make = partial(_make_request, ids, room=room, config=config, embeddings=embeddings)
    first = make(cast("GenerationOptions", fields))
    if count == 1:
        return [first]
    first.sample_group = next(_groups)
    fields["prompt_logprobs"] = None  # of the first one only
    samples = [first]
    for index in range(1, count):
        fields["seed"] = first.seed + index
        sample = make(cast("GenerationOptions", fields))
        sample.sample_group = first.sample_group
        samples.append(sample)
    return samples


_groups = itertools.count(1)
"""Groups of requests with one prompt."""


def _make_request(
    ids: Sequence[int],
    options: GenerationOptions,
    *,
    room: int,
    config: EngineConfig | None = None,
    embeddings: PromptEmbeddings | None = None,
) -> Request:
    config = config or EngineConfig()
    fields: dict[str, Any] = dict(options)
    if unknown := sorted(set(fields) - set(GenerationOptions.__annotations__)):
        raise RequestError(
            f"options: found {', '.join(unknown)}, accepts "
            f"{', '.join(GenerationOptions.__annotations__)}"
        )
    stop_strings(fields.pop("stop", None), config)
    _check_count("logit_bias", fields.get("logit_bias"), "max_logit_bias", config)
    if not isinstance(ends := fields.get("stop_ids", ()), Collection):
        raise RequestError(f"stop_ids: found {ends!r:.60}, accepts a list of token ids")
    room = max(room, 1)
    if fields.setdefault("max_tokens", min(room, DEFAULT_MAX_TOKENS)) is None:
        fields["max_tokens"] = room
    elif is_empty(options):
        fields["max_tokens"] = 1  # which the handle drops
        fields["ends_scored"] = fields.get("prompt_logprobs") is not None
    if fields.get("seed") is None:
        fields["seed"] = random_seed()
    if fields.get("cache_salt") is None:
        fields["cache_salt"] = ""
    check_adapter_name(fields.pop("adapter", None))
    bans = ban_options(fields, config)
    fields.pop("min_tokens", None)
    fields.pop("bad_words", None)
    skips_special = fields.pop("skip_special_tokens", True)
    if not isinstance(skips_special, bool):
        raise RequestError(
            f"skip_special_tokens: found {skips_special!r:.60}, accepts True or False"
        )
    if (structured := fields.pop("structured", None)) is not None:
        read_structured(structured, config.max_grammar_bytes)
        if bans != NO_BANS:
            raise RequestError(
                f"{bans.field}: found it with structured, accepts one of the two: the "
                "grammar decides what the output is"
            )
        if fields.get("ignore_eos") is True:
            raise RequestError(
                "ignore_eos: found True with structured, accepts False: the grammar "
                "decides where the output may end"
            )
    return Request(ids, embeddings=embeddings, **fields)


def is_empty(options: GenerationOptions) -> bool:
    """Whether options ask for no token."""
    most = options.get("max_tokens")
    return type(most) is int and most == 0


def check_adapter_name(name: object) -> None:
    """Raise ``RequestError`` unless ``name`` is ``None`` or a name."""
    if name is not None and not (isinstance(name, str) and name):
        raise RequestError(
            f"adapter: found {name!r:.60}, accepts None or the name of an adapter"
        )


class Bans(NamedTuple):
    """What an output must not have."""

    min_tokens: int
    bad_words: tuple[str, ...]

    @property
    def field(self) -> str:
        """The option that is set."""
        return "min_tokens" if self.min_tokens else "bad_words"


NO_BANS = Bans(0, ())


def ban_options(options: Mapping[str, Any], config: EngineConfig) -> Bans:
    """Return ``min_tokens`` and ``bad_words`` of the options.

    Raises :class:`~inl.errors.RequestError` for a value that is not accepted.
    """
    least, words = options.get("min_tokens", 0), options.get("bad_words", ())
    given = options.get("max_tokens")
    most = MAX_COUNT if given is None else read_integer("max_tokens", given, 0)
    if type(least) is not int or not 0 <= least <= most:
        raise RequestError(f"min_tokens: found {least!r}, accepts 0 to max_tokens")
    return Bans(least, string_tuple("bad_words", words, config))


def random_seed() -> int:
    """Return 63 random bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """Return the prompts of a call, and whether it is a single one.

    Raises :class:`~inl.errors.RequestError` for a value that is not a prompt.
    """
    if isinstance(prompt, str):
        return [prompt], True
    if is_rows(prompt):
        return [[prompt]], True
    if isinstance(prompt, list | tuple) and not prompt:
        return [], False
    items: list[Any] = [None]
    if not isinstance(prompt, bytes | Mapping):
        with suppress(TypeError):
            items = list(prompt)
    if any(isinstance(item, float) or item is None for item in items):
        raise RequestError(
            f"prompt: found {prompt!r:.60}, accepts a string, token ids, "
            "a conversation (a list of messages), or a list of one of these"
        )
    if items and all(isinstance(item, str) for item in items):
        return items, False
    if items and all(isinstance(item, (list, tuple)) for item in items):
        return items, False
    return [items], True


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(each, Mapping) for each in prompt)
    )


def as_single_prompt(prompt: Prompt) -> Prompt:
    """Return the one prompt of a call; raises ``RequestError`` for several."""
    prompts, single = as_prompts(prompt)
    if not prompts:
        raise RequestError(f"prompt: found {prompt!r}, needs at least one token")
    if not single:
        raise RequestError(
            f"prompt: found a list of {len(prompts)}, stream takes one prompt"
        )
    return prompts[0]


def check_one_sample(options: GenerationOptions) -> None:
    """Raise ``RequestError`` if a stream is asked for several completions."""
    if options.get("n", 1) != 1:
        raise RequestError(
            f"n: found {options.get('n')!r}, a stream accepts 1; submit() takes more"
        )


def stop_strings(
    stop: str | Sequence[str] | None, config: EngineConfig
) -> tuple[str, ...]:
    """Return the ``stop`` option as a tuple; raises as :func:`string_tuple`."""
    return string_tuple("stop", stop, config)


def string_tuple(
    name: str, value: str | Collection[str] | None, config: EngineConfig
) -> tuple[str, ...]:
    """Return the strings of an option as a tuple, bounded as stop strings are.

    Raises :class:`~inl.errors.RequestError` for an empty string, another type, or more
    or longer strings than ``config`` accepts.
    """
    strings = (value,) if isinstance(value, str) else value
    if strings is None:
        return ()
    # Not an iterator, which only the first prompt of a call could read.
    if isinstance(strings, bytes | Mapping) or not isinstance(strings, Collection):
        raise RequestError(
            f"{name}: found {strings!r:.60}, accepts a string or a list of strings"
        )
    _check_count(name, strings, "max_stop_strings", config)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name}: found {text!r:.60}, accepts non-empty strings")
        if len(text) > config.max_stop_length:
            raise RequestError(
                f"{name}: found a string of {len(text)} characters, accepts "
                f"{config.max_stop_length} (EngineConfig.max_stop_length)"
            )
    return tuple(strings)


def _check_count(name: str, value: object, field: str, config: EngineConfig) -> None:
    """Raise ``RequestError`` if a collection has more entries than a field accepts."""
    most: int = getattr(config, field)
    if isinstance(value, Collection) and len(value) > most:
        raise RequestError(
            f"{name}: found {len(value)} entries, accepts {most} (EngineConfig.{field})"
        )
