"""One sequence to be answered, and what its answer is made of."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from inl.errors import PromptTooLong, RequestError
from inl.scheduling.sampling_params import (
    RANGES,
    TokenLogprob,
    check_bias,
    check_logprobs,
    check_number,
    rank,
    sampler_for,
)
from inl.spec.message import FEEDBACK, Row
from inl.spec.step import PARAMS

if TYPE_CHECKING:
    from inl.spec.message import IntArray

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: a stop token, its token limit, its caller, or the runner."""

MAX_INT32 = 2**31 - 1


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """Not at the runner: not yet, or no longer after a preemption."""
    RUNNING = "running"
    """Has a slot and blocks at the runner."""
    FINISHED = "finished"


class Event(NamedTuple):
    """What happened to a request: a token, its end, or both at once."""

    request: int
    """The request's id."""
    token: int | None = None
    """A token of the answer; a stop token is given too."""
    reason: Reason | None = None
    """Set on the last event of a request."""
    error: Exception | None = None
    """Set where ``reason`` is ``"error"``."""


make_event = partial(tuple.__new__, Event)
"""Event of its four parts, in a third of the time that the constructor takes."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it. After ``add`` only the scheduler changes it.

    Raises :class:`~inl.errors.RequestError` for an empty prompt, a token that is not
    an int of 0 .. 2**31 - 1, a ``max_tokens`` below 1, or a field of another type or
    out of the range that the message names. What the numbers of sampling do, and in
    which order, is told by :data:`inl.ops.sample.sample`.
    """

    prompt: Iterable[int]
    """Token ids; kept as a tuple."""
    max_tokens: int = 16
    """Tokens to answer with at most."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, the seed decides."""
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """The model's own end tokens do not end the answer."""
    adapter: int = 0
    """Adapter to run with; 0 is none."""
    salt: str = ""
    """Cached prefixes are shared only between equal salts."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this much of the probability."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest's probability."""
    repetition_penalty: float = 1.0
    """Makes tokens of prompt and answer less likely, above 1, or more, below."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token of the answer."""
    frequency_penalty: float = 0.0
    """Taken from the logit of each token, times its count in the answer."""
    logit_bias: Mapping[int, float] | None = None
    """Added to logits, by token id; kept as a dict."""
    logprobs: int | None = None
    """Likeliest tokens to report beside each chosen one; ``None`` reports nothing."""

    id: int = field(init=False, default=0)
    """Order of arrival, from 1; 0 until added."""
    status: Status = field(init=False, default=Status.WAITING)
    tokens: list[int] = field(init=False)
    """Prompt and answer, as far as collected."""
    words: IntArray = field(init=False, repr=False)
    """The prompt as a frame holds it."""
    scores: list[TokenLogprob] = field(init=False, default_factory=list)
    """Of each token of the answer, where ``logprobs`` asks for them."""
    sampler: str = field(init=False)
    """Cheapest way to choose its tokens, one of :data:`~inl.spec.step.SAMPLERS`."""
    prompt_tokens: int = field(init=False)
    cached_tokens: int = field(init=False, default=0)
    """Tokens taken from the prefix cache when last admitted."""
    stops: frozenset[int] = field(init=False, default=frozenset())
    """Every token that ends this answer."""
    limit: int = field(init=False, default=0)
    """Tokens of prompt and answer at most."""
    slot: int = field(init=False, default=0)
    """Home at the runner; 0 is none."""
    feedback: Row = field(init=False, default=Row(0, FEEDBACK), repr=False)
    """Its part of a step that feeds back the token chosen last, and draws none."""
    table: list[list[int]] = field(init=False, default_factory=list)
    """Blocks in order, for each cache group."""
    keys: list[bytes] = field(init=False, default_factory=list)
    """Prefix keys as far as computed: the root, then one for each full block."""
    freed_window_blocks: list[int] = field(init=False, default_factory=list)
    """Leading blocks of each group that its window has passed, given back already."""
    published: int = field(init=False, default=0)
    """Blocks of the table that the prefix cache knows."""
    prefill_len: int = field(init=False, default=0)
    """Tokens that are computed in chunks; later ones one by one."""
    host_token_count: int = field(init=False, default=0)
    """Tokens whose ids the host sends; later ones the runner feeds back itself."""
    scheduled: int = field(init=False, default=0)
    """Tokens in the cache once every step in flight is done."""
    max_scheduled: int = field(init=False, default=0)
    """Value of ``scheduled`` beyond which nothing is to be computed."""
    in_flight: int = field(init=False, default=0)
    """Steps submitted with this request and not collected."""
    last_step: int = field(init=False, default=0)
    """Newest step submitted with this request."""

    def __post_init__(self) -> None:
        ids, self.words = _ids("prompt", self.prompt)
        self.prompt = tuple(ids)
        self.tokens = ids
        self.prompt_tokens = len(self.tokens)
        self.stop_ids = frozenset(_ids("stop_ids", self.stop_ids)[0])
        if not self.tokens:
            raise RequestError("prompt: found no tokens, needs at least one")
        self.max_tokens = _whole("max_tokens", self.max_tokens, 1)
        self.seed = _whole("seed", self.seed)
        self.adapter = _whole("adapter", self.adapter, 0, MAX_INT32)
        self.top_k = _whole("top_k", self.top_k, 0, MAX_INT32)
        for name in RANGES:
            setattr(self, name, check_number(name, getattr(self, name)))
        self.logit_bias = check_bias(self.logit_bias)
        self.logprobs = check_logprobs(self.logprobs)
        special = bool(self.logit_bias) or self.logprobs is not None
        self.sampler = sampler_for(self.params, special=special)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos: found {self.ignore_eos!r}, accepts True or False"
            )
        if not isinstance(self.salt, str):
            raise RequestError(f"salt: found {self.salt!r}, accepts text")

    @property
    def params(self) -> dict[str, float]:
        """Sampling parameters by the names of :data:`~inl.spec.step.PARAMS`."""
        return {name: getattr(self, name) for name in PARAMS}

    @property
    def penalized(self) -> bool:
        """Whether it matters which tokens it holds already."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties)

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[self.prompt_tokens :]


def check(request: Request, vocab: int, context: int, *, sampler: str) -> None:
    """Raise where a runner of this vocabulary and context cannot serve ``request``.

    ``sampler`` is the costliest that it has programs for. Raises
    :class:`~inl.errors.PromptTooLong` and :class:`~inl.errors.RequestError`.
    """
    if request.prompt_tokens >= context:
        raise PromptTooLong(
            f"prompt: found {request.prompt_tokens} tokens, accepts at most "
            f"{context - 1}: the context holds {context} with the answer"
        )
    highest = int(request.words.max())
    if highest >= vocab:
        raise RequestError(
            f"prompt[{request.tokens.index(highest)}]: found token {highest}, "
            f"the vocabulary is 0 to {vocab - 1}"
        )
    banned = max(request.logit_bias or (), default=0)
    if banned >= vocab:
        raise RequestError(
            f"logit_bias: found token {banned}, the vocabulary is 0 to {vocab - 1}"
        )
    if rank(request.sampler) > rank(sampler):
        raise RequestError(
            f"{_needs(request)}: this runner has only {sampler} programs; leave it "
            f'out, or start with EngineConfig(sampling="{request.sampler}")'
        )


def _needs(request: Request) -> str:
    """Name what a request's sampler is there for."""
    if request.sampler == "sample":
        return f"temperature: found {request.temperature}"
    names = (*PARAMS[1:], "logit_bias", "logprobs")
    plain = {name: Request.__dataclass_fields__[name].default for name in names}
    plain["logit_bias"] = {}
    changed = {name: getattr(request, name) for name in names}
    return ", ".join(
        f"{name}: found {value}"
        for name, value in changed.items()
        if value != plain[name]
    )


def _ids(name: str, values: Iterable[int]) -> tuple[list[int], IntArray]:
    given: list[Any] = []
    try:
        given.extend(values)
    except TypeError as error:
        raise _refused(name, given, error) from error
    try:
        # Asks each what index() does, and its range, faster than a loop here could.
        held = array("i", given)
    except (TypeError, OverflowError) as error:
        raise _refused(name, given, error) from error
    if not held:
        return [], np.zeros(0, np.int32)
    words = np.frombuffer(held, np.int32)
    if int(words.min()) < 0:
        raise _refused(name, given, None)
    return held.tolist(), words


def _refused(name: str, given: list[Any], error: Exception | None) -> RequestError:
    """What is wrong with the first value that is no token id."""
    for at, value in enumerate(given):
        if not _is_whole(value):
            return RequestError(f"{name}[{at}]: {error}; accepts token ids")
        if not 0 <= index(value) <= MAX_INT32:
            return RequestError(
                f"{name}[{at}]: found {index(value)}, accepts 0 to {MAX_INT32}"
            )
    return RequestError(f"{name}[0]: {error}; accepts token ids")


def _is_whole(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _whole(
    name: str, value: int, least: int | None = None, most: int | None = None
) -> int:
    try:
        number = index(value)
    except TypeError as error:
        raise RequestError(f"{name}: found {value!r}, accepts an int") from error
    if least is not None and number < least:
        raise RequestError(f"{name}: found {number}, accepts {least} and above")
    if most is not None and number > most:
        raise RequestError(f"{name}: found {number}, accepts at most {most}")
    return number
