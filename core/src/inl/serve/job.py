"""What all dialects translate to and from: jobs, deltas, answers and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inl.engine.answers.conversation import Answer as Answer
from inl.engine.answers.conversation import Call as Call
from inl.engine.answers.conversation import CallDelta as CallDelta
from inl.engine.answers.conversation import Conversation as Conversation
from inl.engine.answers.conversation import Delta as Delta
from inl.engine.answers.conversation import FinishReason as FinishReason
from inl.engine.answers.conversation import Gap as Gap
from inl.engine.answers.conversation import Prompt as Prompt
from inl.engine.answers.conversation import PromptScores as PromptScores
from inl.engine.answers.conversation import Tool as Tool

if TYPE_CHECKING:
    from inl.engine.options import GenerationOptions
    from inl.kv_transfer.spans import SequenceContents
    from inl.serve.resuming import Origin, Seen


@dataclass(frozen=True, slots=True)
class Job:
    """One call of any dialect."""

    model: str | None
    prompts: Sequence[Prompt]
    options: GenerationOptions
    """``seed`` is the one of the first completion; the others follow."""
    count: int = 1
    """Completions for each prompt."""
    stream: bool = False
    structure: Mapping[str, Any] | None = None
    """The engine's option ``structured``."""
    number: str = ""
    """Id of the request, by which it can be aborted."""
    output_ids: Sequence[int] = ()
    """Tokens of its only completion that another engine has generated."""
    contents: SequenceContents | None = None
    """What the cache of that engine has held of it."""
    transcript: bytes = b""
    """Name under which engines remember its outputs, so that a stream can go on."""
    origin: Origin | None = None
    """What its stream depends on, if it can go on behind another connection."""
    seen: Seen | None = None
    """What the client has of its stream, which goes on behind that."""
    engine: str = ""
    """Name of the engine that has generated it before."""

    @property
    def completions(self) -> int:
        """Number of completions of all prompts."""
        return len(self.prompts) * self.count


@dataclass(frozen=True, slots=True)
class Phases:
    """Times of one completion, in seconds."""

    queue: float
    """Until its first step."""
    first_token: float
    """Until its first token."""
    total: float

    @property
    def prefill(self) -> float:
        """Between the first step and the first token."""
        return max(self.first_token - self.queue, 0.0)

    @property
    def decode(self) -> float:
        """After the first token."""
        return self.total - self.first_token

    @property
    def inference(self) -> float:
        """After the first step."""
        return max(self.total - self.queue, 0.0)


@dataclass(slots=True)
class Usage:
    """Tokens of a call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    reasoning_tokens: int = 0
