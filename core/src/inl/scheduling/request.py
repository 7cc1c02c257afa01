"""One sequence to generate: its prompt, its parameters and its scheduling state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from inl.errors import RequestError
from inl.scheduling.embedded_positions import EmbeddedPositions
from inl.scheduling.guide import Guide, restore
from inl.scheduling.request_order import check_order
from inl.scheduling.sampling_params import (
    RANGES,
    TokenLogprob,
    check_bias,
    check_logprobs,
    check_number,
    sampler_for,
)
from inl.scheduling.token_ids import (
    MAX_INT32,
    read_allowed_ids,
    read_integer,
    read_token_ids,
)
from inl.spec.message import FEEDBACK, Row
from inl.spec.step import PARAMS

if TYPE_CHECKING:
    from inl.spec.message import IntArray

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
"""Why a request finished: an end token, a stop string or the end of its grammar; its
token limit; a call of ``cancel``; its deadline; or an error of the runner."""


class Status(Enum):
    """Scheduling state of a request."""

    WAITING = "waiting"
    """Queued, either not started or preempted; has no slot."""
    RUNNING = "running"
    """Has a slot and blocks at the runner."""
    FINISHED = "finished"


class Event(NamedTuple):
    """An update of a request: a new token, its end, or both."""

    request: int
    """Id of the request."""
    token: int | None = None
    """A generated token; end tokens are reported too."""
    finish_reason: FinishReason | None = None
    """Set on the last event of a request."""
    error: Exception | None = None
    """Set if ``finish_reason`` is ``"error"``."""


make_event = partial(tuple.__new__, Event)
"""Make an :class:`Event` from a 4-tuple, three times as fast as its constructor."""


class StepKind(Enum):
    """What a step returns of its rows, all of which are of one kind."""

    SAMPLED = "sampled"
    """The tokens after them."""
    POOLED = "pooled"
    """Hidden states of their last tokens."""
    SCORED = "scored"
    """Log-probabilities of the tokens after their own, which the prompt has."""


class Carried(Protocol):
    """Contents of a cache that a request brings from another engine."""

    @property
    def tokens(self) -> int:
        """Leading tokens that they are of."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it. Once added, only the scheduler changes it.

    Raises :class:`~inl.errors.RequestError` for an empty prompt, a token that is not
    an int of 0 .. 2**31 - 1, a ``max_tokens`` below 1, or a field of another type or
    out of its range. :data:`inl.ops.sample.sample` defines what the sampling
    parameters do, and in which order.
    """

    prompt: Iterable[int]
    """Token ids; stored as a tuple."""
    max_tokens: int = 16
    """Maximum number of tokens to generate."""
    temperature: float = 0.0
    """0 is greedy; above 0, tokens are sampled with ``seed``."""
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output."""
    ignore_eos: bool = False
    """Whether the model's own end tokens do not end the output."""
    adapter: int = 0
    """Number of the adapter at the runner; 0 is none."""
    adapter_digest: str = ""
    """Digest of the adapter, part of prefix-cache keys; "" is none."""
    embeddings: EmbeddedPositions | None = field(default=None, repr=False)
    """Embeddings in place of tokens of the prompt."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests with equal salts."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Sample from the most likely tokens, up to this total probability."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and output become less likely; below 1, more likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output contains."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token, times its count in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to logits, by token id; stored as a dict."""
    logprobs: int | None = None
    """Number of most likely tokens to report per generated token; ``None`` reports no
    log-probabilities."""
    allowed_token_ids: Iterable[int] | None = None
    """The only tokens that may be generated; ``None`` allows all. Stored as an
    ascending tuple."""
    guide: Guide | None = field(default=None, repr=False)
    """Grammar of the output, in its initial state; no other request has it."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report per prompt token; ``None`` reports no
    log-probabilities."""
    prompt_logprobs_start: int = 0
    """First prompt token whose log-probability is reported, if any is."""
    ends_scored: bool = False
    """Whether it ends once its prompt is scored, if that has more than one token."""
    sample_group: int = 0
    """Requests of a group, above 0, have equal prompts, and share their blocks."""
    key: str = ""
    """Keys with waiting requests get equal shares of the computed tokens."""
    priority: int = 0
    """Requests of one key with a higher priority start first."""
    pooled: bool = False
    """Whether the result is a hidden state, which the engine core reads, and nothing is
    generated."""
    pools_all: bool = False
    """Whether the result is of all its tokens, which are then all computed."""
    deadline: float | None = None
    """Unix time at which the request ends, whatever it has generated."""
    captures: bool = False
    """Whether the engine core reads the state after its prompt, for another engine."""
    carried: Carried | None = field(default=None, repr=False)
    """Contents that its next admission begins with, where they suit."""
    captured: Sequence[Any] = field(init=False, default=(), repr=False)
    """What was read, if it ``captures``."""

    id: int = field(init=False, default=0)
    """Order of arrival, from 1; 0 until added."""
    order: int = field(init=False, default=0)
    """Its place among the requests of its key, set where it is queued; see
    :class:`~inl.scheduling.waiting_queue.WaitingQueue`."""
    status: Status = field(init=False, default=Status.WAITING)
    finish_reason: FinishReason | None = field(init=False, default=None)
    """Set when it finishes."""
    error: Exception | None = field(init=False, default=None, repr=False)
    """Set if ``finish_reason`` is ``"error"``."""
    tokens: list[int] = field(init=False)
    """Prompt and collected output."""
    prompt_array: IntArray = field(init=False, repr=False)
    """The prompt as int32 [prompt_tokens], as frames store it."""
    token_logprobs: list[TokenLogprob] = field(init=False, default_factory=list)
    """One per output token if ``logprobs`` is set."""
    prompt_token_logprobs: list[TokenLogprob | None] = field(init=False)
    """One per prompt token so far, if ``prompt_logprobs`` is set; none for the first
    and those before ``prompt_logprobs_start``."""
    sampler: str = field(init=False)
    """Cheapest of :data:`~inl.spec.step.SAMPLERS` that serves the parameters."""
    token_mask: IntArray | None = field(init=False, default=None, repr=False)
    """``allowed_token_ids`` as bits, int32 [ceil(V / 32)]; set by the scheduler."""
    may_need_masks: bool = field(init=False, default=False)
    """Whether any of its steps samples under a mask; set by the scheduler."""
    prompt_tokens: int = field(init=False)
    cached_tokens: int = field(init=False, default=0)
    """Tokens taken from the prefix cache at the last admission."""
    end_ids: frozenset[int] = field(init=False, default=frozenset())
    """Every token that ends the output, the model's own included."""
    max_length: int = field(init=False, default=0)
    """Maximum number of tokens of prompt and output."""
    slot: int = field(init=False, default=0)
    """Slot at the runner; 0 is none."""
    data_rank: int = field(init=False, default=0)
    """Index along "data" of the rank that computes it."""
    feedback_row: Row = field(init=False, default=Row(0, FEEDBACK), repr=False)
    """Its row of a step that feeds back its last token, without a random number."""
    block_table: list[list[int]] = field(init=False, default_factory=list)
    """[G][blocks]: its blocks in order, for each cache group."""
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    """Prefix-cache keys computed so far: the root, then one per full block."""
    freed_window_blocks: list[int] = field(init=False, default_factory=list)
    """Leading blocks of each group that were freed because they left its window."""
    published_blocks: int = field(init=False, default=0)
    """Leading blocks of the table that are in the prefix cache."""
    has_snapshots: bool = field(init=False, default=False)
    """Whether snapshots of its state are taken since the last admission."""
    snapshot_borders: tuple[int, ...] = field(init=False, default=())
    """Ascending positions of its prompt at which snapshots of its state are taken."""
    last_snapshot: int = field(init=False, default=0)
    """Position of the newest snapshot of its state that was planned or restored."""
    prefill_len: int = field(init=False, default=0)
    """Tokens that are computed in chunks; later ones are decoded one by one."""
    host_token_count: int = field(init=False, default=0)
    """Tokens whose ids the host sends; the runner feeds back later ones itself."""
    sent_blocks: int = field(init=False, default=0)
    """Leading blocks of the table that the runner has received."""
    scheduled: int = field(init=False, default=0)
    """Tokens in the cache once every step in flight is done."""
    max_scheduled: int = field(init=False, default=0)
    """Upper bound of ``scheduled``: beyond it there is nothing to compute."""
    uncertain: int = field(init=False, default=0)
    """Drafted tokens of steps in flight. If all are rejected, ``scheduled`` is too
    large by as many."""
    in_flight: int = field(init=False, default=0)
    """Steps with this request that are submitted and not collected."""
    last_step: int = field(init=False, default=0)
    """Newest submitted step with this request."""

    def __post_init__(self) -> None:
        self.tokens, self.prompt_array = read_token_ids("prompt", self.prompt)
        self.prompt = tuple(self.tokens)
        self.prompt_tokens = len(self.tokens)
        self.stop_ids = frozenset(read_token_ids("stop_ids", self.stop_ids)[0])
        if not self.tokens:
            raise RequestError("prompt: found no tokens, needs at least one")
        self.max_tokens = read_integer("max_tokens", self.max_tokens, 1)
        self.seed = read_integer("seed", self.seed)
        self.top_k = read_integer("top_k", self.top_k, 0, MAX_INT32)
        for name in RANGES:
            setattr(self, name, check_number(name, getattr(self, name)))
        self.logit_bias = check_bias(self.logit_bias)
        self.logprobs = check_logprobs(self.logprobs)
        self.allowed_token_ids = read_allowed_ids(self.allowed_token_ids)
        self.prompt_logprobs = check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        self.prompt_logprobs_start = read_integer(
            "prompt_logprobs_start", self.prompt_logprobs_start, 0,
            self.prompt_tokens - 1,
        )  # fmt: skip
        self.prompt_token_logprobs = [None] * max(self.prompt_logprobs_start, 1)
        if self.embeddings is not None and self.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs: found {self.prompt_logprobs} with embeddings in the "
                "prompt, accepts None there"
            )
        if self.pooled and self.embeddings is not None:
            raise RequestError("pooled: found embeddings, accepts token ids only")
        if self.pooled:
            self.max_tokens = 1  # as if the last token were to be sampled
        check_order(self.key, self.priority, self.deadline)
        scored = self.logprobs is not None or self.prompt_logprobs is not None
        special = bool(self.logit_bias) or scored
        self.sampler = sampler_for(self.params, special=special)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos: found {self.ignore_eos!r}, accepts True or False"
            )
        self.adapter = read_integer("adapter", self.adapter, 0, MAX_INT32)
        if bool(self.adapter) != bool(self.adapter_digest):
            raise RequestError(
                f"adapter_digest: found {self.adapter_digest!r} for adapter "
                f"{self.adapter}, accepts the digest of an adapter, and none for 0"
            )
        if not isinstance(self.cache_salt, str):
            raise RequestError(
                f"cache_salt: found {self.cache_salt!r}, accepts a string"
            )

    @property
    def moves(self) -> bool:
        """Whether its steps carry positions, see :class:`EmbeddedPositions`."""
        return self.embeddings is not None and self.embeddings.moves

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt, without the places of embeddings."""
        ids = self.tokens[: self.prompt_tokens]
        if self.embeddings is None:
            return ids
        return [token for at, token in enumerate(ids) if at not in self.embeddings]

    @property
    def params(self) -> dict[str, float]:
        """Sampling parameters by the names of :data:`~inl.spec.step.PARAMS`."""
        return {name: getattr(self, name) for name in PARAMS}

    def samples_masked(self, stop: int) -> bool:
        """Whether a step up to ``stop`` samples under a mask.

        A sample before the last known token is unused.
        """
        constrained = self.token_mask is not None or self.guide is not None
        return constrained and stop >= self.host_token_count

    def step_kind(self, start: int) -> StepKind:
        """Return the kind of step that computes the tokens from ``start``."""
        if self.pooled:
            return StepKind.POOLED
        scored = (
            self.prompt_logprobs is not None
            and self.scored_from <= start < self.prompt_tokens - 1
        )
        return StepKind.SCORED if scored else StepKind.SAMPLED

    @property
    def unsampled_kind(self) -> StepKind | None:
        """The kind of its steps that are not sampled, if there are any."""
        if self.pooled:
            return StepKind.POOLED
        scored = self.prompt_logprobs is not None and self.prompt_tokens > 1
        return StepKind.SCORED if scored else None

    @property
    def scored_from(self) -> int:
        """The first token after which a log-probability is computed."""
        return max(self.prompt_logprobs_start - 1, 0)

    @property
    def longest_span(self) -> int:
        """Tokens of the longest span that one step computes as a whole; 0 for none."""
        return 0 if self.embeddings is None else self.embeddings.longest_span

    def whole(self, position: int) -> int:
        """Return the last position up to this one that divides no span."""
        return position if self.embeddings is None else self.embeddings.whole(position)

    def chunk_stop(self, start: int) -> int:
        """Return the last token up to which a step from ``start`` may compute."""
        if self.step_kind(start) is StepKind.SCORED:
            return self.prompt_tokens - 1  # nothing is known to follow the last one
        if self.prompt_logprobs is not None and start < self.scored_from:
            return self.scored_from
        return self.prefill_len

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the counts of its tokens."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties)

    def resume(self, output_ids: Iterable[int]) -> None:
        """Begin after tokens that another engine has generated, before it is added.

        Positions, penalties and the grammar go on as if they were its own; their
        log-probabilities are not known here. Raises
        :class:`~inl.errors.RequestError` for as many tokens as it may generate.
        """
        assert not self.id, "it has not been added"
        ids, _ = read_token_ids("output_ids", output_ids)
        if len(ids) >= self.max_tokens:
            raise RequestError(
                f"output_ids: found {len(ids)} tokens, accepts fewer than max_tokens "
                f"({self.max_tokens})"
            )
        self.tokens += ids
        if self.logprobs is not None:
            self.token_logprobs = [TokenLogprob(token, nan) for token in ids]
        if self.guide is not None:
            restore(self.guide, ids)

    def restart(self) -> None:
        """Wait again, with all collected tokens, for an admission to another runner."""
        self.status, self.slot, self.block_table = Status.WAITING, 0, []
        # Keys depend on the block size, which may differ on another runner.
        self.block_hashes = []
        self.in_flight = self.last_step = self.uncertain = 0
        del self.token_logprobs[len(self.tokens) - self.prompt_tokens :]
        if self.guide is not None and self.end_reason is None:
            restore(self.guide, self.output_ids)

    @property
    def end_reason(self) -> FinishReason | None:
        """Why the last token ends the output; ``None`` if it does not."""
        if len(self.tokens) > self.prompt_tokens and self.tokens[-1] in self.end_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_tokens :]
