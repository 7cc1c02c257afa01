"""A call of a fleet: its completions, and which engine computes each of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inl.fleet.prefix_index import block_keys, root_of
from inl.serve.admission import Ticket
from inl.serve.frontends.messages import Submit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from inl.fleet.engine_link import EngineLink
    from inl.fleet.router import Assignment
    from inl.serve.frontends.outputs import RemoteHandle


@dataclass(slots=True, eq=False)
class Part:
    """One completion."""

    call: Call
    position: int
    """Among the completions of the call."""
    handle: RemoteHandle
    group: Group | None = None
    """What it was submitted with; ``None`` while it moves to another engine."""
    expected: int | None = None
    """The last token before a move, which the next engine generates again."""
    moves: int = 0
    """Moves since its last new token."""
    state: tuple[str, str] | None = None
    """Address and ticket of what the engine before a move holds of it."""
    moved_at: float = 0.0
    """When it lost its engine, of an output that is being continued."""

    @property
    def number(self) -> int:
        """Its number at the front-end."""
        return self.call.submit.first + self.position


@dataclass(slots=True, eq=False)
class Group:
    """Completions that one message has submitted to an engine."""

    engine: EngineLink
    first: int
    """Number of the first one on the link; the others follow."""
    parts: Sequence[Part]
    assignments: list[Assignment]
    """One for each completion."""
    answered: asyncio.Future[None]
    """Done once the engine has admitted or refused it."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a client."""

    submit: Submit
    ticket: Ticket
    adapter: str = ""
    """Name of the one that it needs, if any."""
    adapter_digest: str = ""
    parts: list[Part] = field(default_factory=list)
    groups: set[Group] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Those that continue its completions."""
    keys: list[list[int]] = field(default_factory=list)
    """Of the blocks of each prompt."""

    def __post_init__(self) -> None:
        salt = self.submit.options.get("cache_salt") or ""
        root = root_of(self.adapter_digest, salt)
        self.keys = [block_keys(prompt, root) for prompt in self.submit.prompts]

    def prompt_of(self, part: Part) -> int:
        """Return the index of a completion's prompt."""
        return part.position // self.submit.count

    def message(self, first: int, seconds: float | None) -> Submit:
        """Return the message that submits all completions.

        first: number of the first one on the link. seconds: until its deadline.
        """
        given = self.submit
        return Submit(
            first, given.model, given.client, given.prompts, _timeless(given.options),
            given.count, given.structure, given.request, [], seconds, given.transcript,
        )  # fmt: skip

    def continued(
        self, part: Part, first: int, output: Sequence[int], seconds: float | None
    ) -> Submit:
        """Return the message that submits one completion after its output so far."""
        given, index = self.submit, part.position % self.submit.count
        options = _timeless(given.options)
        options["seed"] += index
        if index:
            options["prompt_logprobs"] = None  # of the first one only
        return Submit(
            first, given.model, given.client, [given.prompts[self.prompt_of(part)]],
            options, 1, given.structure, given.request, list(output), seconds,
            given.transcript, part.position, part.state,
        )  # fmt: skip

    def seconds_left(self) -> float | None:
        """Return the seconds until its deadline, which is a time of this clock."""
        deadline = self.submit.options.get("deadline")
        return None if deadline is None else max(deadline - time.time(), 0.001)


def _timeless(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without a time, since clocks of hosts differ."""
    return {name: value for name, value in options.items() if name != "deadline"}
