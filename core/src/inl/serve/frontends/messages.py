"""Messages between the engine's process and its front-ends, as MessagePack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from inl.engine.request_handle import TokenLogprob
from inl.serve.api_error import ApiError
from inl.serve.settings import ServerConfig


class Failure(msgspec.Struct, array_like=True):
    """An :class:`ApiError`."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @classmethod
    def of(cls, error: ApiError) -> Failure:
        """Return the fields of an error."""
        return cls(
            error.status, error.message, error.param, error.code, error.retry_after
        )

    def error(self) -> ApiError:
        """Return the error."""
        return ApiError(
            self.status, self.message, param=self.param, code=self.code,
            retry_after=self.retry_after,
        )  # fmt: skip


class ModelSettings(msgspec.Struct, array_like=True):
    """A model: its names in requests, and where its tokenizer is."""

    name: str
    adapters: tuple[str, ...]
    place: str | None
    context: int | None


class Settings(msgspec.Struct, array_like=True, tag="settings"):
    """First message to a front-end."""

    server: ServerConfig
    models: list[ModelSettings]
    has_access_log: bool


class Names(msgspec.Struct, array_like=True, tag="names"):
    """The names of adapters have changed; answered with :class:`Named`."""

    models: list[ModelSettings]


class Named(msgspec.Struct, array_like=True, tag="named"):
    """The front-end uses the names of the last :class:`Names`."""


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of both sides of a link between hosts.

    nonce: 32 random bytes.
    """

    version: int
    nonce: bytes


class Knock(msgspec.Struct, array_like=True, tag="knock"):
    """Proof of a front-end that it knows the engine's secret."""

    proof: bytes


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Why the engine closes the link."""

    reason: str


class Replica(msgspec.Struct, array_like=True, tag="replica"):
    """Proof and description of an engine, for a front-end that has proved itself.

    identity: what decides which tokens follow a prompt, by name. places: requests that
    it computes at the same time. cache_tokens: size of its prefix cache. name: random,
    of this process; empty in versions that remember no outputs. time: of its clock, in
    seconds since the epoch; 0 in versions that do not tell it.
    """

    proof: bytes
    models: list[ModelSettings]
    identity: dict[str, str]
    device: str
    places: int
    cache_tokens: int
    context: int
    sampling_defaults: dict[str, float]
    end_ids: list[int]
    name: str = ""
    time: float = 0.0
    exports: bool = False
    """Whether it answers :class:`Export`."""


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Answered with :class:`Pong` at once."""


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    """The other side handles its messages.

    problem: why an engine answers no request now.
    """

    problem: str | None = None


class Follow(msgspec.Struct, array_like=True, tag="follow"):
    """Ask for all blocks of prompts that an engine has, and for what changes.

    Answered with :class:`Prefixes`. Engines of version 1 do not know it.
    """


class Prefixes(msgspec.Struct, array_like=True, tag="prefixes"):
    """Blocks of prompts that an engine has.

    number: of the message; the next one has the next number. is_whole: whether these
    are all blocks, and otherwise changes. levels: keys of those of the device, host
    memory and files, eight bytes each. removed: keys of those that it has no more.
    costs: time to read a token from host memory and from files, by that to compute it,
    0 if it is not known; empty without tiers. states, left: keys of blocks behind which
    there is a snapshot of recurrent state, and there is none any more; a prompt goes on
    from such a block only. ``None``: the model has no recurrent state.
    """

    number: int
    is_whole: bool
    levels: list[bytes]
    removed: bytes
    costs: Sequence[float]
    states: bytes | None = None
    left: bytes = b""


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The front-end accepts connections."""


class Trouble(msgspec.Struct, array_like=True, tag="trouble"):
    """Why the next request of a model would fail here; ``None``: it would not."""

    model: str
    problem: str | None


class Drain(msgspec.Struct, array_like=True, tag="drain"):
    """Accept nothing more, and exit once open requests have finished.

    force: exit at once.
    """

    force: bool


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Start a call.

    first: number of its first completion, which no other one of the link has; the
    others follow. options: as :class:`~inl.engine.options.GenerationOptions`.
    """

    first: int
    model: str | None
    client: str
    prompts: list[list[int]]
    options: dict[str, Any]
    count: int
    structure: Mapping[str, Any] | None
    request: str
    """Id of the request, by which it can be aborted."""
    output_ids: list[int] = []
    """Tokens of its only completion that another engine has generated."""
    seconds: float | None = None
    """Until its deadline, in place of the option, which is a time of one clock."""
    transcript: bytes = b""
    """Name under which its outputs are remembered; empty: they are not."""
    position: int = 0
    """Of its first completion among those of the transcript."""
    state: tuple[str, str] | None = None
    """Address and ticket of what another engine holds of its only completion."""


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """A completion has ended at a stop string."""

    first: int
    index: int


class Leave(msgspec.Struct, array_like=True, tag="leave"):
    """The front-end reads no more of a call. finished: whether it was answered."""

    first: int
    finished: bool


class Export(msgspec.Struct, array_like=True, tag="export"):
    """End a completion here, which another engine is to continue.

    Answered with :class:`Exported` behind its last tokens, unless it has ended.
    """

    number: int


class Exported(msgspec.Struct, array_like=True, tag="exported"):
    """A completion has ended for another engine, and has no end of its own.

    port: of this host, where that engine takes what the cache holds of it. ticket:
    empty if it is nothing.
    """

    number: int
    port: int
    ticket: str


class Check(msgspec.Struct, array_like=True, tag="check"):
    """Ask whether a client's next call would be admitted."""

    number: int
    client: str


class Forward(msgspec.Struct, array_like=True, tag="forward"):
    """An HTTP request that the engine's process answers."""

    number: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: str


class Recall(msgspec.Struct, array_like=True, tag="recall"):
    """Ask for the outputs of a transcript; answered with :class:`Recalled`.

    engine: name of the one that is asked. count: number of completions.
    """

    number: int
    engine: str
    transcript: bytes
    count: int


class Recalled(msgspec.Struct, array_like=True, tag="recalled"):
    """The tokens so far of each completion, and of its prompt the cached tokens."""

    number: int
    tokens: list[list[int]]
    cached: list[int]


class StoreResponse(msgspec.Struct, array_like=True, tag="store response"):
    """Store a response of a client; answered with :class:`Answered`."""

    number: int
    client: str
    name: str
    data: bytes


class ReadResponse(msgspec.Struct, array_like=True, tag="read response"):
    """Ask for a stored response of a client.

    Answered with :class:`StoredResponse`, or :class:`Answered` with a failure.
    """

    number: int
    client: str
    name: str


class StoredResponse(msgspec.Struct, array_like=True, tag="stored response"):
    """The reply to :class:`ReadResponse`."""

    number: int
    data: bytes


class Answered(msgspec.Struct, array_like=True, tag="answered"):
    """The reply to :class:`Submit`, :class:`Check` and :class:`StoreResponse`."""

    number: int
    failure: Failure | None = None
    sampling: tuple[float, float] | None = None
    """Temperature and ``top_p`` of a call that has begun."""


class Forwarded(msgspec.Struct, array_like=True, tag="forwarded"):
    """The response to a forwarded request."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Scores(msgspec.Struct, array_like=True):
    """Log-probabilities of the new tokens of a completion."""

    number: int
    logprobs: list[TokenLogprob]


class End(msgspec.Struct, array_like=True):
    """The end of a completion.

    has_end_token: whether its last token is no part of the text. prompt:
    log-probabilities of its prompt's tokens, if the call asks for them.
    """

    number: int
    reason: Literal["stop", "length", "cancelled", "deadline", "error"]
    has_end_token: bool
    failure: Failure | None
    prompt: list[TokenLogprob | None] | None


class News(msgspec.Struct, array_like=True, tag="news"):
    """What the completions of a front-end have generated since the last message.

    tokens: those of each number. cached: (number, tokens of its prompt that the prefix
    cache had), with the first token.
    """

    numbers: list[int]
    tokens: list[list[int]]
    cached: list[tuple[int, int]]
    scores: list[Scores]
    ends: list[End]


ToEngine = (
    Ready | Trouble | Named | Ping | Pong | Submit | Stop | Leave | Check | Forward
    | StoreResponse | ReadResponse | Hello | Knock | Recall | Follow
    | Export
)  # fmt: skip
ToFrontEnd = (
    Settings | Names | Ping | Pong | Drain | Answered | Forwarded | StoredResponse
    | News | Hello | Refused | Replica | Recalled | Prefixes
    | Exported
)  # fmt: skip
Message = ToEngine | ToFrontEnd

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder[Message](Message).decode


def plain(value: Any) -> Any:
    """Return JSON-like data in place of the mappings and collections of options."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return value
