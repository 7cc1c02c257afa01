"""What a scheduler follows, a policy, and what it decides, plans of steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from inl.scheduling.buckets import Buckets
from inl.scheduling.request import Request
from inl.scheduling.sampling_params import rank
from inl.spec.limits import TOKEN_BUDGET
from inl.spec.message import BlockTableUpdate
from inl.spec.step import Bucket


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How a scheduler uses a runner."""

    token_budget: int = TOKEN_BUDGET
    """Most tokens in a step."""
    max_rows: int | None = None
    """Most sequences at once; ``None`` is what the runner has slots for."""
    context: int | None = None
    """Most tokens of prompt and answer; ``None`` is what the runner's blocks hold."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens with which the model ends an answer."""
    use_kv_cache: bool = True
    """``False`` computes the whole sequence again for each token."""
    prefix_cache: bool = True
    """Share full blocks between requests that begin with the same tokens."""
    replay: bool = False
    """Answers' tokens are always computed one by one: what a sequence leaves behind
    depends on where its prompt ended, so no block of an answer is shared either."""
    model: str = ""
    """Digest of the model and its weights; a part of every prefix key."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_rows", "context"):
            value = getattr(self, name)
            least = 2 if name == "context" else 1
            if value is not None and value < least:
                raise ValueError(f"{name}: found {value}, accepts {least} and above")


class Chunk(NamedTuple):
    """Tokens ``[start, stop)`` of one request, to be computed in one step."""

    request: Request
    start: int
    stop: int


make_chunk = partial(tuple.__new__, Chunk)
"""Chunk of a triple; a named tuple's own constructor takes three times as long, and
there is one for each row of each step."""


class Admission(NamedTuple):
    """A slot given to a request of which ``length`` tokens are in its blocks."""

    request: Request
    length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, and what the runner must be told before it, in this order."""

    releases: list[int]
    """Slots that are taken back."""
    admissions: list[Admission]
    cells: list[BlockTableUpdate]
    """Entries that block tables gained since the last step."""
    chunks: list[Chunk]
    """Rows of the step, decoding ones first; empty where there is no step."""
    decode_rows: int = 0
    step: int = 0
    """Number of the step, from 1; 0 where there is no step."""
    bucket: Bucket | None = None
    """Program of the step."""
    tokens: int = 0
    """Tokens that the step computes."""


class StepBuilder:
    """A plan while the scheduler fills it."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.size = budget
        self.budget = budget
        """Tokens that the step can still take."""
        self.chunks: list[Chunk] = []
        self.decode_rows = 0
        self.cells: list[BlockTableUpdate] = []
        self.admissions: list[Admission] = []
        self.prompts: list[Request] = []
        """Running requests whose prompts are not computed yet."""

    def schedule(self, request: Request, stop: int) -> None:
        """Compute a request's tokens up to ``stop``, or as far as the budget goes."""
        start = request.scheduled
        stop = min(stop, start + self.budget)
        self.budget -= stop - start
        self.chunks.append(Chunk(request, start, stop))
        request.scheduled = stop
        request.in_flight += 1
        request.last_step = self.step

    def decode(self, request: Request) -> None:
        """Compute the token that a request's last step chose."""
        start = request.scheduled
        stop = request.scheduled = start + 1
        self.budget -= 1
        self.chunks.append(make_chunk((request, start, stop)))
        request.in_flight += 1
        request.last_step = self.step

    def admit(self, request: Request) -> None:
        """Tell the runner of a request's slot, blocks and cached tokens."""
        self.admissions.append(Admission(request, request.scheduled))

    def update_block_table(self, request: Request, index: int) -> None:
        """Tell the runner of the blocks at ``index`` of a request's table."""
        for group, blocks in enumerate(request.table):
            self.cells.append(
                BlockTableUpdate(group, request.slot, index, blocks[index])
            )

    def build(self, releases: list[int], buckets: Buckets) -> Plan:
        """Choose the program, after which nothing changes any more."""
        lists = releases, self.admissions, self.cells, self.chunks
        if not self.chunks:
            return Plan(*lists)
        sampler = max({chunk.request.sampler for chunk in self.chunks}, key=rank)
        tokens = self.size - self.budget
        bucket = buckets.choose(tokens, len(self.chunks), sampler)
        return Plan(*lists, self.decode_rows, self.step, bucket, tokens)
