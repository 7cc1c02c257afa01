"""What conversations and answers consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from inl.bounded_json import parse_json
from inl.errors import InvalidJson

if TYPE_CHECKING:
    from inl.scheduling.sampling_params import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls", "stop_string"]
"""Why an answer ended; "stop_string": at one of the strings of the request."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; parameters: its JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def as_template_value(self) -> dict[str, Any]:
        """Return the value that chat templates expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to answer, as chat templates expect them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    """"auto", "none", "required", or the name of a tool behind "tool:"."""
    only_tools: bool = False
    """Whether calls of other functions are text."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    parallel_calls: bool = True
    """Whether an answer may have several calls."""
    context: Sequence[int] = ()
    """Token ids of earlier turns, before the messages."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in a text, which the answer fills."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    """Names and texts of other files, as context."""


Prompt = str | list[int] | Conversation | Gap


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call; the first part has its id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A prompt and the log-probabilities of its tokens."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]
    """One for each token; ``None`` for the first and those that were not asked for.
    Fewer of a request that ended in its prompt."""


@dataclass(slots=True)
class Delta:
    """What was generated since the last delta."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The string that ended the answer."""
    prompt: PromptScores | None = None
    """With the last delta, if the job asks for ``prompt_logprobs``."""

    def __bool__(self) -> bool:
        return bool(
            self.content
            or self.reasoning
            or self.calls
            or self.token_ids
            or self.finish_reason
        )


@dataclass(slots=True)
class Call:
    """A complete tool call."""

    id: str
    name: str
    arguments: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object; empty if they were cut off."""
        try:
            found = parse_json(self.arguments or "{}", "arguments")
        except InvalidJson:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class Answer:
    """One completion: the sum of its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: PromptScores | None = None
    finish_reason: FinishReason = "stop"
    stop_string: str | None = None
    submitted: float = 0.0
    """When its request was given to the engine, as ``time.perf_counter()``."""
    began: float = 0.0
    """When its first token was read; 0 before."""
    ended: float = 0.0

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return ()

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.calls:
            if part.name is not None:
                self.calls.append(Call(part.id or "", part.name))
            self.calls[part.index].arguments += part.arguments
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_string = delta.stop_string
            self.prompt = delta.prompt
