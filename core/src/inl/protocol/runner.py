"""Runners: the interface that an engine computes steps through, and its call rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inl.errors import OutOfMemory, ProtocolError, RunnerError
from inl.forks import on_fork
from inl.spec.encoder import TokenSequence
from inl.spec.limits import Limits as Limits
from inl.spec.message import MASKED, READ, STEP, WRITE, Header, header, transferred
from inl.spec.step import NO_TOKEN, Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.cache_layout import CacheLayout, Parts
    from inl.spec.message import IntArray

T = TypeVar("T")

Each = Callable[..., "Iterable[Any]"]
"""Calls a function for several arguments, as ``map`` does, perhaps on threads."""

MAX_READS = 8
"""Most READ frames whose contents are on the device."""


class Reply(NamedTuple):
    """Result of one step."""

    step: int
    tokens: NDArray[np.int32]
    """[R, W] sampled tokens; values of unused rows are undefined. Of a step that
    verifies drafts, a row has its accepted tokens, then
    :data:`~inl.spec.step.NO_TOKEN`."""
    scores: Scores | None = None
    """Scores of the tokens, NumPy arrays; only from "sample_filtered" programs. Of a
    step with the SCORED flag, those of the tokens after its own, [T]."""
    hidden: NDArray[np.float32] | None = None
    """[R, H] hidden states of the rows' last tokens, of a step with the POOLED flag;
    see :func:`pooled_reply`."""
    loads: NDArray[np.int32] | None = None
    """[L, E] tokens of the step that each expert of each layer with experts computes;
    of steps that :attr:`~inl.config.EngineConfig.expert_load_interval` selects."""


def pooled_reply(step: int, hidden: NDArray[np.float32]) -> Reply:
    """Return the reply of a step with the POOLED flag: no tokens, [R, 1]."""
    import numpy as np

    return Reply(step, np.full((len(hidden), 1), NO_TOKEN, np.int32), None, hidden)


def scored_reply(step: int, rows: int, scores: Scores) -> Reply:
    """Return the reply of a step with the SCORED flag: no tokens, [R, 1]."""
    import numpy as np

    return Reply(step, np.full((rows, 1), NO_TOKEN, np.int32), scores)


class AdapterSource(NamedTuple):
    """An adapter to load."""

    number: int
    """Number in admissions, 1 to ``limits.adapters``."""
    path: str
    """Folder of its files, where the runner computes."""
    digest: str
    """See :attr:`inl.adapters.folder.Adapter.digest`."""


class CacheWrite(NamedTuple):
    """A WRITE frame and its contents."""

    message: IntArray
    parts: Parts

    @property
    def nbytes(self) -> int:
        """Size of the contents in bytes."""
        return sum(part.data.nbytes for part in self.parts.values())


class BlockWrites(NamedTuple):
    """A WRITE frame and the contents of each of its blocks."""

    message: IntArray
    blocks: Sequence[Parts]

    @property
    def nbytes(self) -> int:
        """Size of the contents in bytes."""
        return sum(CacheWrite(self.message, parts).nbytes for parts in self.blocks)

    def joined(self) -> CacheWrite:
        """Return the frame with all contents in one."""
        from inl.spec.cache_layout import BLOCKS, joined

        return CacheWrite(self.message, joined(self.blocks, BLOCKS))


class Runner(ABC):
    """Computes steps in order. Not thread-safe.

    Implementations in this tree derive from :class:`PipelinedRunner`.
    """

    limits: Limits

    @property
    def cache_layout(self) -> CacheLayout | None:
        """Layout of the contents that READ and WRITE frames copy; ``None`` without."""
        return None

    @abstractmethod
    def submit(self, message: IntArray) -> None:
        """Queue a frame; does not wait for the device.

        message: int32 [words], see :mod:`inl.spec.message`; the caller may reuse it.
        At most ``limits.depth`` steps may be in flight; other frames do not count.
        Raises :class:`~inl.errors.ProtocolError` for a frame that is out of turn or
        malformed, and :class:`~inl.errors.OutOfMemory` for a step that was not begun:
        its rows are lost, and the runner serves all others as before.
        """

    @abstractmethod
    def sample(self, step: int, masks: IntArray) -> None:
        """Sample the tokens of a step whose header has the MASKED flag.

        masks: int32 [S, ceil(V / 32)], one row per sample: one of each row of the step,
        or of each token if it verifies drafts. Bit ``t % 32`` of word ``t // 32``
        is set if token t is allowed. Call it once for each masked step, before the next
        ``submit``. Raises :class:`~inl.errors.ProtocolError`.
        """

    @abstractmethod
    def collect(self) -> Reply:
        """Wait for the oldest step in flight and return its result.

        Raises :class:`~inl.errors.ProtocolError` if no step is in flight or that step
        waits for ``sample``. After :class:`~inl.errors.OutOfMemory` the step is no
        longer in flight; after any other exception it still is.
        """

    def read(self) -> Parts:
        """Wait for the contents that the oldest READ frame has asked for.

        Each is returned once, whatever became of the steps before and after it. Raises
        :class:`~inl.errors.ProtocolError` if none is asked for.
        """
        raise RunnerError("runner: copies no contents of its cache")

    def write(self, message: IntArray, parts: Parts) -> None:  # noqa: ARG002
        """Queue a WRITE frame with its contents; does not wait for the device.

        The arrays of the contents must not change afterwards. Raises
        :class:`~inl.errors.ProtocolError` for contents of another layout than
        :attr:`cache_layout`.
        """
        raise RunnerError("runner: copies no contents of its cache")

    def read_blocks(self, count: int, each: Each = map) -> Sequence[Parts]:
        """Wait as :meth:`read` for contents of ``count`` blocks.

        Returns those of each block, in memory of their own. each: makes copies.
        """
        from inl.spec.cache_layout import BLOCKS, copied, divided

        return list(each(copied, divided(self.read(), count, BLOCKS)))

    def write_blocks(
        self, message: IntArray, blocks: Sequence[Parts], each: Each = map
    ) -> None:
        """Queue a WRITE frame as :meth:`write`, with the contents of each block.

        each: makes copies.
        """
        from inl.spec.cache_layout import BLOCKS, joined

        whole = joined(blocks, BLOCKS, empty=self.host_array, each=each)
        self.write(message, whole)

    def encode(self, sequences: Sequence[TokenSequence]) -> NDArray[np.float32]:
        """Return the results [n, K] of sequences, beside steps.

        Waits for the device. Up to 64 sequences with ``limits.token_budget`` tokens in
        all. Raises :class:`~inl.errors.OutOfMemory`, and
        :class:`~inl.errors.RunnerError` if the runner's model is no encoder.
        """
        raise RunnerError(f"encode: {len(sequences)} sequences, but this runner's "
                          "model has no encoder")  # fmt: skip

    @property
    def has_pinned_memory(self) -> bool:
        """Whether :meth:`host_array` allocates memory that is copied faster."""
        return False

    @property
    def is_in_host_memory(self) -> bool:
        """Whether the cache is in the memory of this process, not of a device."""
        return False

    def host_array(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Allocate an array, of a dtype of NumPy, for contents of :meth:`write`.

        From it they are copied to the device fast, such as in pinned memory.
        """
        import numpy as np

        return np.empty(shape, dtype)

    def load_adapter(self, source: AdapterSource) -> None:
        """Load an adapter in place of the one that has its number.

        For steps that are submitted later; no admitted sequence has the number. Steps
        may be in flight, and the newest may wait for masks.

        :meth:`reset` keeps it. Raises :class:`~inl.errors.ModelError` for files that
        are not accepted or have another digest, and :class:`~inl.errors.OutOfMemory`;
        then the number has no adapter, and the runner continues.
        """
        raise RunnerError(
            f"adapter {source.path}: this runner has no room for adapters; set "
            "EngineConfig.max_adapters"
        )

    def reset(self) -> None:
        """Drop all steps in flight and all slots, as a new runner has none.

        An exception, such as KeyboardInterrupt, may have interrupted any earlier call
        at any instruction; the contents of the cache are lost then. The next step may
        have any number. Raises :class:`~inl.errors.RunnerError` if the runner cannot
        continue.
        """
        raise RunnerError(
            "runner: a call was interrupted, and this runner has no reset"
        )

    @abstractmethod
    def close(self) -> None:
        """Free all resources; closing twice is allowed."""


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that was submitted and not collected."""

    head: Header
    work: Any = None
    """What the runner itself stores of the step."""


@dataclass(slots=True, eq=False)
class PendingRead:
    """A READ frame whose contents were not returned."""

    group: int
    count: int
    work: Any = None
    """What the runner itself stores of it."""


class PipelinedRunner(Runner):
    """Enforces the call rules of a runner over four abstract hooks.

    A call out of turn raises :class:`~inl.errors.ProtocolError` before its hook runs:

    - at most ``limits.depth`` steps are in flight;
    - after a step with the MASKED flag, ``sample`` comes once, with masks of the right
      shape, before the next ``submit`` and before that step's ``collect``;
    - only steps in flight are collected, oldest first;
    - the contents of at most :data:`MAX_READS` READ frames wait for ``read``, and a
      WRITE frame comes with its contents;
    - nothing but ``close`` follows ``close``.

    In a forked child every call but ``close`` raises
    :class:`~inl.errors.RunnerError`, unless ``survives_fork`` is set.
    """

    survives_fork = False
    """Whether the runner also computes in a forked child."""

    def __init__(self) -> None:
        self._in_flight: deque[StepInFlight] = deque()
        self._unsampled: StepInFlight | None = None
        """The newest step in flight, if it waits for ``sample``."""
        self._reads: deque[PendingRead] = deque()
        self._closed = self._is_released = self._is_forked = False
        on_fork(self)

    def submit(self, message: IntArray) -> None:
        self._check_open()
        head = header(message)
        if self._unsampled is not None:
            raise _waits_for_masks(self._unsampled.head)
        if head.kind == READ:
            self._submit_read(message, head)
            return
        if head.kind == WRITE:
            raise ProtocolError("a WRITE frame: call write with its contents")
        if head.kind != STEP:
            self._submit_frame(message, head)
            return
        if len(self._in_flight) >= self.limits.depth:
            raise ProtocolError(
                f"step {head.step}: {len(self._in_flight)} steps are in flight, "
                f"the limit is {self.limits.depth}; call collect first"
            )
        flight = StepInFlight(head, self._submit_frame(message, head))
        self._in_flight.append(flight)
        if head.flags & MASKED:
            self._unsampled = flight

    def sample(self, step: int, masks: IntArray) -> None:
        self._check_open()
        flight = self._unsampled
        if flight is None or flight.head.step != step:
            raise ProtocolError(f"sample: step {step} does not wait for masks")
        shape = flight.head.bucket.samples, -(-self.limits.vocab // 32)
        if masks.shape != shape or masks.dtype.name != "int32":
            raise ProtocolError(
                f"masks of step {step}: found {masks.dtype} {list(masks.shape)}, "
                f"accepts int32 {list(shape)}"
            )
        self._sample(flight, masks)
        self._unsampled = None

    def collect(self) -> Reply:
        self._check_open()
        if not self._in_flight:
            raise ProtocolError("collect: no step is in flight")
        flight = self._in_flight[0]
        if flight is self._unsampled:
            raise _waits_for_masks(flight.head)
        try:
            reply = self._collect(flight)
        except OutOfMemory:
            self._in_flight.popleft()
            raise
        self._in_flight.popleft()
        return reply

    def _submit_read(self, message: IntArray, head: Header) -> None:
        if self.cache_layout is None:
            super().read()
        from inl.protocol.frame_check import check_transfer

        check_transfer(message, self.limits)
        if len(self._reads) >= MAX_READS:
            raise ProtocolError(f"{MAX_READS} READ frames wait: call read first")
        work = self._submit_frame(message, head)
        group, ids = transferred(message)
        self._reads.append(PendingRead(group, len(ids), work))

    def read(self) -> Parts:
        return self._oldest_read(self._read)

    def _oldest_read(self, wait: Callable[[PendingRead], T]) -> T:
        """Return what ``wait`` returns for the oldest READ frame, once."""
        self._check_open()
        if not self._reads:
            raise ProtocolError("read: no READ frame waits")
        found = wait(self._reads[0])
        self._reads.popleft()
        return found

    def write(self, message: IntArray, parts: Parts) -> None:
        self._check_write(message, [parts])
        self._write(message, parts)

    def _check_write(self, message: IntArray, each: Sequence[Parts]) -> None:
        """Check a WRITE frame with its contents, of all blocks or of each."""
        from inl.protocol.frame_check import check_transfer

        self._check_open()
        if self._unsampled is not None:
            raise _waits_for_masks(self._unsampled.head)
        layout = self.cache_layout
        if header(message).kind != WRITE:
            raise ProtocolError("write: needs a WRITE frame")
        if layout is None:
            super().write(message, each[0])
            return
        check_transfer(message, self.limits)
        group, ids = transferred(message)
        if len(each) not in (1, len(ids)):
            raise ProtocolError(f"write: found {len(each)} contents of {len(ids)} "
                                "blocks, accepts one for each or for all")  # fmt: skip
        layout.check_all(group, len(ids) // len(each), each)

    def load_adapter(self, source: AdapterSource) -> None:
        self._check_open()
        if not self.limits.adapters:
            super().load_adapter(source)
        if not 1 <= source.number <= self.limits.adapters:
            raise ProtocolError(
                f"adapter {source.path}: found number {source.number}, accepts 1 to "
                f"{self.limits.adapters}"
            )
        self._load_adapter(source)

    def reset(self) -> None:
        self._check_open()
        self._reset()
        self._in_flight.clear()
        self._reads.clear()
        self._unsampled = None

    def close(self) -> None:
        self._closed = True
        if self._is_released or self._is_forked:
            return
        try:
            self._close()
            self._is_released = True
        finally:
            self._in_flight.clear()
            self._reads.clear()
            self._unsampled = None

    def after_fork_in_child(self) -> None:
        """Leave what the runner owns to the parent, unless it survives a fork."""
        if not self.survives_fork:
            self._is_forked = True
            self._disconnect()

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("runner: is closed; create another")
        if self._is_forked:
            raise RunnerError(
                f"{self._name()}: was started before this process was forked and "
                "serves the parent only; create the engine in the child, or start "
                "processes with the method spawn"
            )
        self._check_alive()

    def _name(self) -> str:
        """Name of the runner in errors."""
        return "runner"

    def _disconnect(self) -> None:
        """Close this process's copies of descriptors, without telling the parent's."""

    def _check_alive(self) -> None:
        """Raise RunnerError if the runner failed earlier and cannot go on."""

    @abstractmethod
    def _submit_frame(self, message: IntArray, head: Header) -> Any:
        """Queue a frame; returns the ``work`` of a step for the other hooks.

        head: the checked header. The frame is only valid during the call.
        """

    @abstractmethod
    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        """Sample a masked step. The masks are only valid during the call."""

    @abstractmethod
    def _collect(self, flight: StepInFlight) -> Reply:
        """Wait for the oldest step in flight; may be called again if interrupted."""

    def _read(self, pending: PendingRead) -> Parts:  # noqa: ARG002
        """Wait for the oldest READ frame; may be called again if interrupted."""
        return super().read()

    def _write(self, message: IntArray, parts: Parts) -> None:
        """Queue a checked WRITE frame; both are only valid during the call."""
        super().write(message, parts)

    def _load_adapter(self, source: AdapterSource) -> None:
        """Load an adapter; its number is in range."""
        super().load_adapter(source)

    @abstractmethod
    def _reset(self) -> None:
        """Drop all slots and what is queued; called again if interrupted."""

    @abstractmethod
    def _close(self) -> None:
        """Free all resources; called again if interrupted."""


def _waits_for_masks(head: Header) -> ProtocolError:
    return ProtocolError(f"step {head.step} waits for its masks: call sample first")
