"""The in-process runner: a model on one backend, or on one rank of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from inl.backend.base import Precompiler
from inl.dtypes import HostArray, wrap
from inl.errors import ProtocolError
from inl.executor.model_step import advance, forward, sample
from inl.executor.tracing import trace
from inl.protocol.frame_check import FrameCheck
from inl.protocol.runner import Limits, Reply, Runner
from inl.spec.cache import Paged, State
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.message import (
    HEADER,
    MASKED,
    STEP,
    TOKEN_BIAS,
    Header,
    admit_size,
    step_frame,
)
from inl.spec.model import Model
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket, Scores, Tables

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.ops.protocol import Ops
    from inl.spec.message import IntArray

SIZE_CLASSES = (
    Bucket(1, 1), Bucket(16, 16), Bucket(16, 4), Bucket(64, 64), Bucket(64, 16),
)  # fmt: skip
"""Representatives of the sizes 1, 2 to 16, and 17 and more of an exact backend: with a
token for each row, and with more."""

MAX_ADMISSIONS = 16
"""Admissions and releases of one call, at most."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights on a device."""

    model: Model
    config: Any
    groups: Any
    """Tree of :class:`~inl.weights.plan.Planned`, which the weights follow."""
    weights: Any
    selection: KernelSelection
    ranks: int = 1


class _Pending(NamedTuple):
    step: int
    bucket: Bucket
    tokens: Any
    """[S] on the device, in a pair with their scores where the bucket is "sample_filtered";
    ``None`` until ``sample`` for a masked step."""


class LocalRunner(Runner):
    """Runs steps on a backend of this process, programs made when first needed."""

    def __init__(self, backend: Backend, loaded: Loaded, limits: Limits) -> None:
        self.limits = replace(limits, buckets=tuple(backend.buckets(limits)))
        self.compilations = 0
        self._backend = backend
        self.loaded = loaded
        """What it computes; without weights once closed."""
        self._state = backend.state(self._shard_state(), limits=self.limits)
        self._programs: dict[tuple[str, Bucket], Callable[..., Any]] = {}
        self._check = FrameCheck(self.limits)
        self._closed = False
        self._resolved: dict[Bucket, ResolvedOps] = {}
        self._prepared: set[Bucket] = set()
        self._pending: deque[_Pending] = deque()
        self._queued_admissions: dict[int, IntArray] = {}
        """The last admission or release of each slot that the next message finds
        done."""
        self._masked: tuple[Header, Any, Any] | None = None
        # Ops of a prompt's size, which the first step needs too.
        self._admit = self._compile(
            partial(_admit, self.ops(SIZE_CLASSES[-1])), None, (1,)
        )

    def submit(self, message: IntArray) -> None:
        self._check_open()
        if self._masked is not None:
            raise ProtocolError(
                f"step {self._masked[0].step} waits for its masks: call sample first"
            )
        if len(self._pending) >= self.limits.depth and message[1] == STEP:
            raise ProtocolError(
                f"submit: {len(self._pending)} steps are in flight, "
                f"the limit is {self.limits.depth}"
            )
        found = self._check.read(message)
        if found.kind not in (TOKEN_BIAS, STEP):
            self._queued_admissions[int(message[HEADER])] = message.copy()
            return
        self._apply_admissions()
        if found.kind == TOKEN_BIAS:
            frame = self._backend.tensor(wrap(message))
            (self._state,) = self._program("set_token_bias", SIZE_CLASSES[0])(
                frame, self._state
            )
            return
        frame = self._backend.message(wrap(message))
        if found.flags & MASKED:
            self._submit_masked(found, frame)
            return
        program = self._program("advance", found.bucket)
        tokens, self._state = program(self.loaded.weights, frame, self._state)
        self._pending.append(_Pending(found.step, found.bucket, tokens))

    def _apply_admissions(self) -> None:
        """Let in and out whoever waits for it: many frames in one copy and call."""
        frames = list(self._queued_admissions.values())
        for start in range(0, len(frames), MAX_ADMISSIONS):
            several = np.stack(frames[start : start + MAX_ADMISSIONS])
            if len(several) > 1 and self.limits.buckets:
                # Programs are compiled for one and for this many, the rest is padding.
                several.resize((MAX_ADMISSIONS, several.shape[1]), refcheck=False)
            messages = self._backend.tensor(wrap(several))
            (self._state,) = self._admit(messages, self._state)
        self._queued_admissions.clear()

    def _submit_masked(self, found: Header, frame: Any) -> None:
        program = self._program("logits", found.bucket)
        logits, step, self._state = program(self.loaded.weights, frame, self._state)
        self._masked = found, logits, step
        self._pending.append(_Pending(found.step, found.bucket, None))

    def sample(self, step: int, masks: IntArray) -> None:
        if self._masked is None or self._masked[0].step != step:
            raise ProtocolError(f"step {step}: no masks were announced for it")
        found, logits, arrays = self._masked
        words = -(-self.limits.vocab // 32)
        if masks.shape != (found.rows, words) or masks.dtype.name != "int32":
            raise ProtocolError(
                f"masks: found {masks.dtype} {list(masks.shape)}, "
                f"expected int32 {[found.rows, words]}"
            )
        program = self._program("masked", found.bucket)
        bits = self._backend.tensor(wrap(masks))
        tokens, self._state = program(logits, bits, arrays, self._state)
        self._masked = None
        self._pending[-1] = self._pending[-1]._replace(tokens=tokens)

    def collect(self) -> Reply:
        if not self._pending:
            raise ProtocolError("collect: no step is in flight")
        step, bucket, tokens = self._pending[0]
        if tokens is None:
            raise ProtocolError(f"step {step} waits for its masks: call sample first")
        self._pending.popleft()
        scores = None
        if bucket.sampler == "sample_filtered":
            tokens, told = tokens
            scores = Scores(*(self._backend.numpy(part).data for part in told))
        shape = bucket.rows, bucket.tokens_per_row
        chosen = self._backend.numpy(tokens).data.reshape(shape).astype(np.int32)
        return Reply(step, chosen, np.ones(bucket.rows, np.int32), scores)

    def close(self) -> None:
        self._closed = True
        self._pending.clear()
        self._queued_admissions.clear()
        self._programs.clear()
        self._state = State((), {}, Tables(*(None,) * len(Tables._fields)))
        self.loaded = replace(self.loaded, weights=None)

    def logits(self, message: IntArray) -> HostArray:
        """Compute a step and choose nothing: its logits [S, V]; nothing in flight.

        For comparing backends and for perplexity; keys and values are cached as usual.
        """
        self._check_open()
        if self._pending or message[1] != STEP:
            raise ProtocolError("logits: needs a step, and no step in flight")
        program = self._program("logits", self._check.read(message).bucket)
        self._apply_admissions()
        frame = self._backend.message(wrap(message))
        logits, _, self._state = program(self.loaded.weights, frame, self._state)
        return self._backend.numpy(logits)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make every program of ``limits.buckets`` and run it once, on nobody.

        ``progress`` is told (programs done, programs). No step may be in flight.
        """
        self._check_open()
        if self._pending:
            raise ProtocolError("warm_up: a step is in flight; collect it first")
        buckets = self.limits.buckets
        self._precompile(buckets)
        for count in (1, MAX_ADMISSIONS) if buckets else ():
            # Of slot 0, which is nobody's.
            size = count, admit_size(self.limits.groups, self.limits.max_blocks_per_seq)
            nobody = self._backend.tensor(wrap(np.zeros(size, np.int32)))
            (self._state,) = self._admit(nobody, self._state)
        for done, bucket in enumerate(buckets, start=1):
            program = self._program("advance", bucket)
            frame = self._dummy_message(bucket)
            _, self._state = program(self.loaded.weights, frame, self._state)
            if progress:
                progress(done, len(buckets))

    def _dummy_message(self, bucket: Bucket) -> Any:
        """The message of a step without rows."""
        empty = step_frame(
            bucket, (), step=0, groups=self.limits.groups,
            block_size=self.limits.block_size, decode_rows=0,
        )  # fmt: skip
        return self._backend.tensor(wrap(empty))

    def _precompile(self, buckets: Iterable[Bucket]) -> None:
        """Make ready what the programs of these buckets need, side by side."""
        ahead = self._backend.offers(Precompiler)
        fresh = dict.fromkeys(buckets).keys() - self._prepared
        if ahead is None or not fresh:
            return
        self._prepared |= fresh
        loaded, state = self.loaded, self._state
        ahead.precompile([
            partial(
                advance, self.ops(bucket), loaded.model, loaded.config,
                loaded.weights, self._dummy_message(bucket), state,
            )
            for bucket in fresh
        ])  # fmt: skip

    def tracer(self, bucket: Bucket) -> Tracer:
        """What the model calls at this bucket, and what was chosen for it."""
        loaded = self.loaded
        return trace(
            loaded.model, loaded.config, loaded.groups, bucket, self.limits,
            loaded.selection, ranks=loaded.ranks,
        )  # fmt: skip

    def ops(self, bucket: Bucket) -> Ops:
        """Resolved ops of a bucket; an exact size shares those of its class."""
        family = bucket if self.limits.buckets else size_class(bucket)
        if family not in self._resolved:
            self._resolved[family] = ResolvedOps(self.tracer(family))
        return cast("Ops", self._resolved[family].at(bucket))

    def _program(self, name: str, bucket: Bucket) -> Callable[..., Any]:
        known = self._programs.get((name, bucket))
        if known is not None:
            return known
        if name == "advance":
            # Whatever comes first, rows that decode come next.
            self._precompile((bucket, *self.limits.buckets[:1]))
        ops, loaded = self.ops(bucket), self.loaded
        made: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
            "advance": (partial(advance, ops, loaded.model, loaded.config), (2,)),
            "logits": (partial(forward, ops, loaded.model, loaded.config), (2,)),
            "masked": (partial(_masked, ops), (3,)),
            "set_token_bias": (partial(_mark, ops), (1,)),
        }
        run, consumes = made[name]
        if len(self._programs) > 4096:
            self._programs.clear()  # an exact backend meets ever new sizes
        program = self._compile(
            run, None if name == "set_token_bias" else bucket, consumes
        )
        self._programs[name, bucket] = program
        return program

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("runner: is closed; start another")

    def _compile(
        self, run: Callable[..., Any], bucket: Bucket | None, consumes: tuple[int, ...]
    ) -> Callable[..., Any]:
        self.compilations += 1
        return self._backend.compile(run, bucket, consumes=consumes)

    def _shard_state(self) -> Any:
        ranks = self.loaded.ranks

        def shard(item: Any) -> Any:
            if isinstance(item, Paged):
                return item._replace(kv_heads=item.kv_heads // ranks)
            return item

        return tuple(shard(i) for i in self.loaded.model.state(self.loaded.config))


def size_class(bucket: Bucket) -> Bucket:
    """Representative of an exact size's class."""
    single = bucket.rows >= bucket.tokens
    alike = [b for b in SIZE_CLASSES if (b.rows == b.tokens) == single]
    fits = [b for b in alike if bucket.tokens <= b.tokens]
    return (fits or alike[-1:])[0]._replace(
        tokens_per_row=bucket.tokens_per_row, sampler=bucket.sampler
    )


def _admit(ops: Ops, messages: Any, state: Any) -> tuple[Any]:
    return (state._replace(tables=ops.admit(messages, state.tables)),)


def _mark(ops: Ops, message: Any, state: Any) -> tuple[Any]:
    return (state._replace(tables=ops.set_token_bias(message, state.tables)),)


def _masked(
    ops: Ops, logits: Any, masks: Any, step: Any, state: Any
) -> tuple[Any, Any]:
    masked = ops.mask_logits(logits, masks)
    return sample(ops, masked, step, state, scored=logits)
