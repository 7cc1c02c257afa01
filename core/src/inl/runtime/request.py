"""One sequence to be answered, and what its answer is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from operator import index
from typing import Literal, NamedTuple

from inl.errors import PromptTooLong, RequestError

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: a stop token, its token limit, its caller, or the runner."""

MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = 2.0**128 - 2.0**104


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


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it. After ``add`` only the scheduler changes it.

    Raises :class:`~inl.errors.RequestError` for an empty prompt, a token that is not
    an int of 0 .. 2**31 - 1, a ``max_tokens`` below 1, a ``temperature`` below 0, or a
    field of another type.
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

    id: int = field(init=False, default=0)
    """Order of arrival, from 1; 0 until added."""
    status: Status = field(init=False, default=Status.WAITING)
    tokens: list[int] = field(init=False)
    """Prompt and answer, as far as collected."""
    prompt_tokens: int = field(init=False)
    cached_tokens: int = field(init=False, default=0)
    """Tokens taken from the prefix cache when last admitted."""
    stops: frozenset[int] = field(init=False, default=frozenset())
    """Every token that ends this answer."""
    limit: int = field(init=False, default=0)
    """Tokens of prompt and answer at most."""
    slot: int = field(init=False, default=0)
    """Home at the runner; 0 is none."""
    table: list[list[int]] = field(init=False, default_factory=list)
    """Blocks in order, for each cache group."""
    keys: list[bytes] = field(init=False, default_factory=list)
    """Prefix keys as far as computed: the root, then one for each full block."""
    published: int = field(init=False, default=0)
    """Blocks of the table that the prefix cache knows."""
    fed: int = field(init=False, default=0)
    """Tokens whose ids the host sends; later ones the runner feeds back itself."""
    scheduled: int = field(init=False, default=0)
    """Tokens in the cache once every step in flight is done."""
    goal: int = field(init=False, default=0)
    """Value of ``scheduled`` beyond which nothing is to be computed."""
    in_flight: int = field(init=False, default=0)
    """Steps submitted with this request and not collected."""
    last_step: int = field(init=False, default=0)
    """Newest step submitted with this request."""

    def __post_init__(self) -> None:
        ids = _ids("prompt", self.prompt)
        self.prompt = tuple(ids)
        self.tokens = ids
        self.prompt_tokens = len(self.tokens)
        self.stop_ids = frozenset(_ids("stop_ids", self.stop_ids))
        if not self.tokens:
            raise RequestError("prompt: found no tokens, needs at least one")
        self.max_tokens = _whole("max_tokens", self.max_tokens, 1)
        self.seed = _whole("seed", self.seed)
        self.adapter = _whole("adapter", self.adapter, 0, MAX_INT32)
        if not _is_temperature(self.temperature):
            raise RequestError(
                f"temperature: found {self.temperature!r}, accepts 0 and above"
            )
        if not isinstance(self.salt, str):
            raise RequestError(f"salt: found {self.salt!r}, accepts text")

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[self.prompt_tokens :]


def check(request: Request, vocab: int, context: int, *, draws: bool) -> None:
    """Raise where a runner of this vocabulary and context cannot serve ``request``.

    ``draws`` tells whether it has programs for temperatures above 0. Raises
    :class:`~inl.errors.PromptTooLong` and :class:`~inl.errors.RequestError`.
    """
    if request.prompt_tokens >= context:
        raise PromptTooLong(
            f"prompt: found {request.prompt_tokens} tokens, accepts at most "
            f"{context - 1}: the context holds {context} with the answer"
        )
    highest = max(request.tokens)
    if highest >= vocab:
        raise RequestError(
            f"prompt[{request.tokens.index(highest)}]: found token {highest}, "
            f"the vocabulary is 0 to {vocab - 1}"
        )
    if request.temperature and not draws:
        raise RequestError(
            f"temperature: found {request.temperature}, this runner has only greedy "
            "programs; accepts 0"
        )


def _ids(name: str, values: Iterable[int]) -> list[int]:
    ids: list[int] = []
    try:
        for value in values:
            ids.append(index(value))
    except TypeError as error:
        where = f"{name}[{len(ids)}]"
        raise RequestError(f"{where}: {error}; accepts token ids") from error
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_INT32):
        bad = next(value for value in ids if not 0 <= value <= MAX_INT32)
        raise RequestError(
            f"{name}[{ids.index(bad)}]: found {bad}, accepts 0 to {MAX_INT32}"
        )
    return ids


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


def _is_temperature(value: object) -> bool:
    # NaN and infinity fail the comparison too.
    return isinstance(value, int | float) and 0 <= value <= MAX_FLOAT32
