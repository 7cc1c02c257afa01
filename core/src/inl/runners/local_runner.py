"""The in-process runner: a model on one backend, or one rank of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.backend.base import CachedMemory, ForkSafety
from inl.backend.host import is_host_memory
from inl.dtypes import HostArray, cast, widen, wrap
from inl.errors import ProtocolError
from inl.executor.context_lengths import TableWidths
from inl.executor.expert_loads import count_experts, counted
from inl.executor.load_plan import LoadPlan
from inl.executor.model_executor import MAX_ADMISSIONS, ModelExecutor
from inl.executor.model_executor import Loaded as Loaded
from inl.executor.repeated_frames import (
    SingleSteps,
    with_programs,
    without_stopped,
)
from inl.progress import LoadStage, Progress, ProgressReporter
from inl.protocol.frame_check import FrameCheck
from inl.protocol.runner import (
    AdapterSource,
    Each,
    Limits,
    PendingRead,
    PipelinedRunner,
    Reply,
    StepInFlight,
    pooled_reply,
    scored_reply,
)
from inl.spec.embedded_rows import EmbeddedRows, read_inputs
from inl.spec.message import (
    ADMISSION_WORD,
    EMBEDDED,
    HEADER_WORD,
    MASKED,
    POOLED,
    READ,
    SCORED,
    STEP,
    TOKEN_BIAS,
    Header,
    header,
    layout,
    transferred,
)
from inl.spec.scored_tokens import with_next
from inl.spec.step import NO_TOKEN, Scores
from inl.spec.tree import tree_map

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.backend.base import Backend
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.executor.pipeline import Stage
    from inl.protocol.runner import Limits
    from inl.spec.cache_layout import CacheLayout, Parts
    from inl.spec.message import IntArray


class OneByOne(NamedTuple):
    """A repeated step in flight whose steps were submitted one by one."""

    message: IntArray
    steps: list[tuple[IntArray, Any]]
    """Of each step: the rows of the message, and their tokens on the device."""


class Counted(NamedTuple):
    """A step in flight that counts the tokens of each expert."""

    tokens: Any
    experts: Any
    """Of each layer, see :func:`inl.executor.expert_loads.advance_counted`."""


class LocalRunner(PipelinedRunner):
    """Runs steps on a backend of this process; programs are compiled on first use.

    Admissions and releases are queued and applied, several in one call, before the
    next step.
    """

    def __init__(
        self,
        backend: Backend,
        loaded: Loaded,
        limits: Limits,
        *,
        load_interval: int = 0,
    ) -> None:
        """Make a runner; load_interval: steps from one to the next whose reply has the
        loads of the experts, 0 for none.
        """
        super().__init__()
        self._load_interval, self._experts = load_interval, 0
        if load_interval:
            self._experts = count_experts(loaded.model, loaded.config)
        self.limits = with_programs(backend, limits)
        self.executor = ModelExecutor(backend, loaded, self.limits)
        self._backend = backend
        self.survives_fork = backend.offers(ForkSafety) is not None
        self._check = FrameCheck(self.limits)
        self._widths = TableWidths(backend, self.limits)
        self._queued_admissions: dict[int, IntArray] = {}
        """The last queued admission or release of each slot."""

    @property
    def loaded(self) -> Loaded:
        """The model that is computed; without weights once closed."""
        return self.executor.loaded

    @property
    def taps(self) -> Any:
        """Hidden states of the tokens of the newest step, a tensor of the backend, if
        the model has taps.
        """
        return self.executor.taps

    def read_taps(self, is_read: bool) -> None:
        """Set whether the next steps return the hidden states of the model's taps."""
        self.executor.is_tapped = is_read and bool(self.loaded.taps)

    def _submit_frame(self, message: IntArray, head: Header) -> Any:
        """Return what the step computes, on the device.

        Tokens; logits and step of a masked one, or hidden states of a pooled one.
        """
        if head.kind == READ:
            return self.executor.read(*transferred(message))
        self._check.check(message, head)
        if head.kind not in (STEP, TOKEN_BIAS):
            slot = int(message[ADMISSION_WORD.slot])
            self._queued_admissions[slot] = message.copy()
            self._widths.admit(message)
            return None
        self._apply_admissions()
        if head.kind == TOKEN_BIAS:
            self.executor.set_token_bias(self._backend.tensor(wrap(message)))
            return None
        if head.bucket.repeat > 1 and self.executor.loops is None:
            return self._submit_one_by_one(message, head)
        if not self.loaded.stage.is_last:
            return self.executor.advance(*self._step_arguments(message, head))
        if head.flags & SCORED:
            return self._score(message, head)
        step = self._step_arguments(message, head)
        if head.flags & MASKED:
            return self.executor.logits(*step)
        if head.flags & POOLED:
            return self.executor.pool(*step)
        if self._counts(head):
            return Counted(*self.executor.advance_counted(*step))
        return self.executor.advance(*step)

    def _counts(self, head: Header) -> bool:
        """Whether a step counts the tokens of each expert."""
        is_plain = head.bucket.repeat == 1 and not head.flags & EMBEDDED
        return bool(self._experts) and is_plain and head.step % self._load_interval == 0

    def _score(self, message: IntArray, head: Header) -> Any:
        """Submit a step with the SCORED flag."""
        limits, width = self.limits, self._widths.select(message, head)
        longer = with_next(
            message, groups=limits.groups, block_size=limits.block_size,
            vocab=limits.vocab,
        )  # fmt: skip
        return self.executor.score(
            head.bucket, self._backend.message(wrap(longer)), width
        )

    def _submit_one_by_one(self, message: IntArray, head: Header) -> OneByOne:
        """Submit the single steps of a repeated step."""
        width = self._widths.select(message, head)
        steps: list[tuple[IntArray, Any]] = []
        singles = SingleSteps(message, head, self.limits)
        for number in range(singles.count):
            bucket, frame, rows = singles.frame(number)
            arguments = bucket, self._backend.message(wrap(frame)), width
            tokens = self.executor.advance(*arguments)
            if bucket.sampler == "sample_filtered":
                tokens, _ = tokens
            steps.append((rows, tokens))
        return OneByOne(message.copy(), steps)

    def _step_arguments(self, message: IntArray, head: Header) -> tuple[Any, ...]:
        """Return bucket, frame on the device, table width and embeddings of a step."""
        width, limits = self._widths.select(message, head), self.limits
        if not head.flags & EMBEDDED:
            return head.bucket, self._backend.message(wrap(message)), width
        place = layout(head.bucket, groups=limits.groups, block_size=limits.block_size)
        inputs = read_inputs(message, place.size, head.used_tokens, limits)
        dtype, tensor = self.loaded.config.dtype, self._backend.tensor

        def placed(part: HostArray) -> Any:
            if part.dtype in ("int32", dtype):
                return tensor(part)
            return tensor(cast(widen(part), dtype))

        rows: EmbeddedRows = tree_map(placed, inputs.dense(head.tokens, limits))
        plain = np.ascontiguousarray(message[: place.size])
        return head.bucket, tensor(wrap(plain)), width, rows

    def _apply_admissions(self) -> None:
        """Apply queued admissions and releases, many frames in one copy and call."""
        frames = list(self._queued_admissions.values())
        for start in range(0, len(frames), MAX_ADMISSIONS):
            batch = np.stack(frames[start : start + MAX_ADMISSIONS])
            if len(batch) > 1 and self.limits.buckets:
                # Programs are compiled for one and for MAX_ADMISSIONS; pad with zeros.
                batch.resize((MAX_ADMISSIONS, batch.shape[1]), refcheck=False)
            self.executor.admit(self._backend.tensor(wrap(batch)))
        self._queued_admissions.clear()

    def _load_adapter(self, source: AdapterSource) -> None:
        stacks = self.loaded.adapters
        assert stacks is not None, "the limits have room for adapters"
        adapter = stacks.read(source.path, source.digest)
        self.executor.load_adapter(source.number, adapter)

    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        if not self.loaded.stage.is_last:
            return
        logits, step = flight.work
        bits = self._backend.tensor(wrap(masks))
        bucket = flight.head.bucket
        flight.work = self.executor.sample_masked(bucket, logits, bits, step)

    def _collect(self, flight: StepInFlight) -> Reply:
        head, tokens, scores, loads = flight.head, flight.work, None, None
        if not self.loaded.stage.is_last:
            shape = head.rows, head.bucket.reply_width
            return Reply(head.step, np.full(shape, NO_TOKEN, np.int32))
        if head.flags & POOLED:
            return pooled_reply(head.step, widen(self._backend.numpy(tokens)))
        if head.flags & SCORED:
            return self._scored_reply(head, tokens)
        if isinstance(tokens, OneByOne):
            return Reply(head.step, self._read_one_by_one(tokens, head))
        if isinstance(tokens, Counted):
            tokens, experts = tokens
            ids = [self._backend.numpy(each).data for each in experts]
            loads = counted(ids, head, self._experts)
        if head.bucket.sampler == "sample_filtered" and head.bucket.repeat == 1:
            tokens, device_scores = tokens
            scores = Scores(*(self._backend.numpy(part).data for part in device_scores))
        shape = head.rows, head.bucket.reply_width
        host_tokens = self._backend.numpy(tokens).data.reshape(shape)
        return Reply(head.step, host_tokens.astype(np.int32), scores, None, loads)

    def _scored_reply(self, head: Header, parts: Any) -> Reply:
        numpy = self._backend.numpy
        columns = (
            [numpy(each).data for each in column] for column in zip(*parts, strict=True)
        )
        return scored_reply(head.step, head.rows, Scores(*map(np.concatenate, columns)))

    def _read_one_by_one(self, work: OneByOne, head: Header) -> IntArray:
        """Return the tokens of a repeated step, int32 [R, N]."""
        tokens = np.full((head.rows, head.bucket.repeat), NO_TOKEN, np.int32)
        for step, (rows, sampled) in enumerate(work.steps):
            host = self._backend.numpy(sampled).data.reshape(-1)
            tokens[rows, step] = host[: len(rows)]
        return without_stopped(tokens, work.message, head, self.limits)

    @property
    def cache_layout(self) -> CacheLayout | None:
        return self.executor.transfers.layout

    @property
    def has_pinned_memory(self) -> bool:
        return self.executor.transfers.has_own_memory

    @property
    def is_in_host_memory(self) -> bool:
        return is_host_memory(self._backend)

    def host_array(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        return self.executor.transfers.host_array(shape, dtype)

    def _read(self, pending: PendingRead) -> Parts:
        return self.executor.transfers.host(pending.group, pending.count, pending.work)

    def _write(self, message: IntArray, parts: Parts) -> None:
        self.executor.write(*transferred(message), [parts])

    def read_blocks(self, count: int, each: Each = map) -> Sequence[Parts]:
        transfers = self.executor.transfers
        if not transfers.reads_blocks:
            return super().read_blocks(count, each)
        return self._oldest_read(
            lambda read: transfers.host_blocks(read.group, read.count, read.work)
        )

    def write_blocks(
        self, message: IntArray, blocks: Sequence[Parts], each: Each = map
    ) -> None:
        if not self.executor.transfers.writes_blocks:
            super().write_blocks(message, blocks, each)
            return
        self._check_write(message, blocks)
        self.executor.write(*transferred(message), blocks)

    def _reset(self) -> None:
        self._return_unsampled()
        self._queued_admissions.clear()
        self._check = FrameCheck(self.limits)
        self._widths.reset()
        self.executor.reset()

    def _return_unsampled(self) -> None:
        """Sample a step without its masks if other stages wait for the tokens."""
        flight, stage = self._unsampled, self.loaded.stage
        if flight is None or not (stage.index and stage.is_last):
            return
        bucket = flight.head.bucket
        if bucket.verifies:
            words = -(-self.limits.vocab // 32)
            self._sample(flight, np.full((bucket.samples, words), -1, np.int32))

    def _name(self) -> str:
        return str(self._backend.device)

    def _close(self) -> None:
        self._queued_admissions.clear()
        self.executor.release()
        if (cached := self._backend.offers(CachedMemory)) is not None:
            cached.release()

    def logits(self, message: IntArray) -> HostArray:
        """Compute a step without sampling and return its logits [S, V].

        For comparing backends and for perplexity; keys and values are cached as usual.
        Raises :class:`~inl.errors.ProtocolError` if a step is in flight.
        """
        self._check_open()
        if self._in_flight or message[HEADER_WORD.kind] != STEP:
            raise ProtocolError("logits: needs a step frame, and no step in flight")
        head = header(message)
        self._check.check(message, head)
        self._apply_admissions()
        logits, _ = self.executor.logits(*self._step_arguments(message, head))
        return self._backend.numpy(logits)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program of ``limits.buckets`` and run it once on padding.

        progress: called with (programs done, programs). Raises
        :class:`~inl.errors.ProtocolError` if a step is in flight.
        """
        self._check_open()
        if self._in_flight:
            raise ProtocolError("warm_up: a step is in flight; call collect first")
        self.executor.warm_up(progress)


def start_runner(
    language: LanguageModel,
    backend: Backend,
    config: EngineConfig,
    *,
    limits: Limits | None = None,
    progress: Progress | None = None,
    rank: int = 0,
    stage: Stage | None = None,
) -> LocalRunner:
    """Load the weights on ``backend`` and make its runner.

    limits: planned from the free memory by default. progress: called with the
    bytes of the weights, then with the programs that are compiled at the start
    (:attr:`~inl.config.EngineConfig.warm_up`). rank, stage: part of the weights along
    the axes "tensor" and "pipeline", if ``backend`` offers
    :class:`~inl.backend.base.Collectives`; every rank must make the same call.
    """
    plan = LoadPlan.of(language, backend, config, limits=limits, stage=stage)
    report = ProgressReporter(progress)
    report(0, 1)  # so that a bar appears before the cache is looked up
    runner = LocalRunner(
        plan.backend, plan.load(report, rank=rank), plan.limits,
        load_interval=config.expert_load_interval or 0,
    )  # fmt: skip
    if config.warm_up:
        report.stage = LoadStage.COMPILING
        runner.warm_up(report)
    return runner
