"""Executes the compiled programs of a model on one backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from inl.backend.base import Precompiler, WeightUpdates
from inl.backend.programs import compile_program, info_of
from inl.backend.provisional import DeviceLoops, WholeModels
from inl.dtypes import wrap
from inl.errors import OutOfMemory, RunnerError
from inl.executor.cache_transfers import CacheTransfers
from inl.executor.consumption import NO_STATE, call_consuming, recovered_state
from inl.executor.context_lengths import table_widths
from inl.executor.expert_loads import advance_counted
from inl.executor.hidden_states import pooled
from inl.executor.loaded import Loaded as Loaded
from inl.executor.model_step import BODIES, pool_mean, sample
from inl.executor.pipeline import ReturningOps, pass_on
from inl.executor.repeated_step import advance_repeated
from inl.executor.taps import with_taps
from inl.placement.ranks import collectives_of
from inl.protocol.runner import Limits
from inl.spec.cache import State
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.message import admit_size, step_frame
from inl.spec.step import Bucket

if TYPE_CHECKING:
    from inl.adapters.folder import Adapter
    from inl.backend.base import Backend
    from inl.ops.protocol import Ops
    from inl.spec.cache_layout import Parts
    from inl.spec.model import Model

Program = Callable[..., Any]
ProgramKey = tuple[str, Bucket, int | None, bool]
"""Name, bucket, columns of the block tables (``None``: all), and whether with taps."""

SIZE_CLASSES = tuple(
    Bucket(tokens=tokens, rows=rows)
    for tokens, rows in ((1, 1), (16, 16), (16, 4), (64, 64), (64, 16))
)
"""Representative sizes for backends that serve every size exactly: 1, 2 to 16, and 17
and more tokens; with one token per row, and with more."""

OF_THEIR_OWN = ("pool", "score")
"""Programs that call other ops than "advance", or for other numbers of tokens."""

COUNTED = "advance_counted"
"""Program that computes "advance" and returns the experts of its tokens too."""

MAX_ADMISSIONS = 16
"""Most admissions and releases in one call."""

MAX_PROGRAMS = 4096
"""Programs kept; a backend that serves every size exactly makes one for each."""

LOST = "state: was consumed by a program that failed; call reset first"


class ModelExecutor:
    """A model's weights, state and compiled programs on one backend.

    Programs are compiled when first needed. Each call consumes the state and replaces
    it (:mod:`inl.executor.consumption`); messages are frames on the device.
    """

    def __init__(self, backend: Backend, loaded: Loaded, limits: Limits) -> None:
        self.backend, self.loaded, self.limits = backend, loaded, limits
        is_whole = loaded.stage.count == 1
        self.loops = backend.offers(DeviceLoops) if is_whole else None
        """Loops of programs; ``None`` where repeated steps are submitted one by one."""
        self.is_tapped = bool(loaded.taps)
        """Whether the next steps return the hidden states of the taps."""
        self._model = computed_model(backend, loaded)
        """The model that programs compute."""
        self._untapped = self._model
        """That of programs without taps."""
        if loaded.taps:
            self._untapped = computed_model(backend, replace(loaded, taps=()))
        self._pooled = pooled(loaded)
        """The model of programs that return hidden states."""
        self.state: State = backend.state(loaded.shard_state(), limits=limits)
        self.taps: Any = None
        """Hidden states of the newest step, [T, taps * H], if the model has taps."""
        self._is_consuming = False
        """Whether a program has consumed the state and not returned it."""
        self._programs: dict[ProgramKey, Program] = {}
        self._ops: dict[tuple[Bucket, int | None, str, bool], ResolvedOps] = {}
        self._precompiled: set[tuple[Bucket, int | None, bool]] = set()
        self.transfers = self._cache_transfers()
        # The ops of a prompt's size, which the first step needs too.
        ops = self.ops(SIZE_CLASSES[-1])
        info = info_of("admit", None, limits)
        self._admit = compile_program(backend, partial(_admit, ops), info)

    def admit(self, messages: Any) -> None:
        """Apply admissions and releases, int32 [n, words]."""
        self.call(self._admit, messages)

    def set_token_bias(self, message: Any) -> None:
        """Apply a token bias frame."""
        self.call(self.program("set_token_bias", SIZE_CLASSES[0]), message)

    def advance(
        self, bucket: Bucket, message: Any, width: int | None = None, *rows: Any
    ) -> Any:
        """Compute one step; returns its tokens, on the device.

        ``None`` on a stage that is not the last. width: columns of the block tables
        that the step reads; ``None`` is all. rows: an
        :class:`~inl.spec.embedded_rows.EmbeddedRows`, or nothing.
        """
        name = "advance_embedded" if rows else _program_name(bucket)
        program = self.program(name, bucket, width)
        if not self.loaded.stage.is_last:
            self.call(program, self.loaded.weights, message, *rows)
            return None
        tokens, *taps = self.call(program, self.loaded.weights, message, *rows)
        self.taps = next(iter(taps), None)
        return tokens

    def advance_counted(
        self, bucket: Bucket, message: Any, width: int | None = None
    ) -> tuple[Any, Any]:
        """Compute :meth:`advance`; returns the tokens, and the experts of each layer.

        See :func:`inl.executor.expert_loads.advance_counted`.
        """
        program = self.program(COUNTED, bucket, width)
        results = self.call(program, self.loaded.weights, message)
        tokens, experts, *taps = results
        self.taps = next(iter(taps), None)
        return tokens, experts

    def logits(
        self, bucket: Bucket, message: Any, width: int | None = None, *rows: Any
    ) -> tuple[Any, Any]:
        """Compute a step without sampling; returns logits [S, V] and the step."""
        name = "logits_embedded" if rows else "logits"
        program = self.program(name, bucket, width)
        results = self.call(program, self.loaded.weights, message, *rows)
        logits, step, *taps = results
        self.taps = next(iter(taps), None)
        return logits, step

    def pool(self, bucket: Bucket, message: Any, width: int | None = None) -> Any:
        """Compute a step; returns a hidden state of each of its rows, [R, H].

        Of the row's last token, or their mean, see :attr:`Loaded.pooling`.
        """
        program = self.program("pool", bucket, width)
        (hidden,) = self.call(program, self.loaded.weights, message)
        self.taps = None
        return hidden

    def score(self, bucket: Bucket, message: Any, width: int | None = None) -> Any:
        """Compute a step; returns the scores of the tokens after its own, in parts.

        message: see :func:`inl.spec.scored_tokens.with_next`.
        """
        program = self.program("score", bucket, width)
        scores, *taps = self.call(program, self.loaded.weights, message)
        self.taps = next(iter(taps), None)
        return scores

    def sample_masked(self, bucket: Bucket, logits: Any, masks: Any, step: Any) -> Any:
        """Sample the tokens of a step under masks, int32 [R, ceil(V / 32)]."""
        width = step.blocks.shape[-1]
        whole = width == self.limits.max_blocks_per_seq
        program = self.program("masked", bucket, None if whole else width)
        (tokens,) = self.call(program, logits, masks, step)
        return tokens

    def read(self, group: int, ids: Sequence[int]) -> Any:
        """Begin to copy contents of the cache, see :class:`CacheTransfers`."""
        if self._is_consuming:
            raise RunnerError(LOST)
        return self.transfers.read(self.state, group, ids)

    def write(self, group: int, ids: Sequence[int], each: Sequence[Parts]) -> None:
        """Overwrite contents of the cache, see :class:`CacheTransfers`."""
        program, *arguments = self.transfers.write(group, ids, each)
        self.call(program, *arguments)

    def _cache_transfers(self) -> CacheTransfers:
        loaded = self.loaded
        return CacheTransfers(
            self.backend, loaded.selection, loaded.shard_state(), self.limits,
            self.state,
        )  # fmt: skip

    def call(self, program: Program, *args: Any) -> list[Any]:
        """Call a program on the state, its last argument and result.

        During the call only the program refers to the state. Raises
        :class:`~inl.errors.OutOfMemory` if the program has raised it and still holds
        the state, and :class:`~inl.errors.RunnerError` if the state was lost.
        """
        if self._is_consuming:
            raise RunnerError(LOST)
        results: list[Any]
        self._is_consuming = True
        try:
            *results, self.state = call_consuming(program, args, self._take_state)
        except OutOfMemory as error:
            self.state = recovered_state(error)
            self._is_consuming = False
            raise
        self._is_consuming = False
        return results

    def _take_state(self) -> State:
        """Return the state; afterwards the executor does not refer to it."""
        state, self.state = self.state, NO_STATE
        return state

    def reset(self) -> None:
        """Allocate the state again if a program that consumes it was interrupted."""
        if self._is_consuming:
            self._drop_state()
            spec = self.loaded.shard_state()
            self.state = self.backend.state(spec, limits=self.limits)
            self._is_consuming = False

    def program(self, name: str, bucket: Bucket, width: int | None = None) -> Program:
        """Return a program, compiled on the first call.

        name: one of :data:`~inl.spec.program.PROGRAMS` but "admit", or
        :data:`COUNTED`, which backends know as "advance".
        """
        program = self._programs.get((name, bucket, width, self.is_tapped))
        if program is not None:
            return program
        if name in ("advance", "repeat"):
            # The first step is often a prompt; decoding rows come next.
            self.precompile((bucket, *self.limits.buckets[:1]), width)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.clear()
        body = self._body(name, bucket, width)
        shape = None if name == "set_token_bias" else bucket
        known = "advance" if name == COUNTED else name
        info = info_of(known, shape, self.limits, width)
        program = compile_program(self.backend, body, info)
        self._programs[name, bucket, width, self.is_tapped] = program
        return program

    def _body(self, name: str, bucket: Bucket, width: int | None) -> Program:
        """Return the function to compile."""
        is_pooled = name == "pool"
        loaded = self._pooled if is_pooled else self._tapped
        ops = self.ops(bucket, width, name if name in OF_THEIR_OWN else "advance")
        stage = loaded.stage
        if stage.count > 1:
            peers = collectives_of(self.backend)
            if not stage.is_last and name in ("advance", "advance_embedded"):
                keywords: Any = {"stage": stage, "collectives": peers}
                keywords |= {} if width is None else {"table_width": width}
                return partial(pass_on, ops, self._model, loaded.config, **keywords)
            if bucket.verifies:
                ops = cast("Ops", ReturningOps(ops, stage, peers))
        if name == "masked":
            return partial(_sample_masked, ops)
        if name == "set_token_bias":
            return partial(_set_token_bias, ops)
        body = BODIES.get(name, advance_repeated)
        if name == COUNTED:
            body = advance_counted
        if is_pooled and loaded.pooling == "mean":
            body = pool_mean
        # Without a keyword where it is not needed: backends may identify a function by
        # the arguments of the partial.
        keywords = {} if width is None else {"table_width": width}
        if name == "repeat":
            keywords["loops"] = self.loops
        elif loaded.taps:
            keywords |= {"body": body, "taps": loaded.taps}
            body = with_taps
        model = self._model if self.is_tapped else self._untapped
        if is_pooled:
            model = computed_model(self.backend, loaded)
        return partial(body, ops, model, loaded.config, **keywords)

    def precompile(self, buckets: Iterable[Bucket], width: int | None = None) -> None:
        """Compile the kernels of these buckets in parallel, if the backend can."""
        precompiler = self.backend.offers(Precompiler)
        keys = [(bucket, width, self.is_tapped) for bucket in buckets]
        fresh = dict.fromkeys(keys).keys() - self._precompiled
        if precompiler is None or not fresh:
            return
        self._precompiled |= fresh
        weights, state = self.loaded.weights, self.state
        precompiler.precompile([
            partial(
                self._body(_program_name(bucket), bucket, width),
                weights, self.dummy_message(bucket), state,
            )
            for bucket, *_ in fresh
        ])  # fmt: skip

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program of ``limits.buckets`` and run it once on padding.

        progress: called with (programs done, programs).
        """
        buckets = [
            bucket
            for bucket in self.limits.buckets
            if bucket.repeat == 1 or self.loops is not None
        ]
        widths = (*table_widths(self.backend, self.limits), None)
        for width in widths:
            self.precompile(buckets, width)
        for count in (1, MAX_ADMISSIONS) if buckets else ():
            self.admit(self._dummy_admissions(count))
        taps = [*dict.fromkeys((self.is_tapped, False))]
        programs = [
            (bucket, width, is_tapped)
            for is_tapped in taps
            for bucket in buckets
            for width in widths
            # Drafts come from a head that reads the taps.
            if is_tapped == self.is_tapped or not bucket.verifies
        ]
        for done, (bucket, width, is_tapped) in enumerate(programs, start=1):
            self.is_tapped = is_tapped
            self.advance(bucket, self.dummy_message(bucket), width)
            if progress:
                progress(done, len(programs))
        self.is_tapped = taps[0]

    def dummy_message(self, bucket: Bucket) -> Any:
        """Return the frame of a padding-only step, on the device."""
        empty = step_frame(
            bucket, (), step=0, groups=self.limits.groups,
            block_size=self.limits.block_size, decode_rows=0,
        )  # fmt: skip
        return self.backend.tensor(wrap(empty))

    def _dummy_admissions(self, count: int) -> Any:
        """Return padding-only admissions (to slot 0), on the device."""
        words = admit_size(self.limits.groups, self.limits.max_blocks_per_seq)
        return self.backend.tensor(wrap(np.zeros((count, words), np.int32)))

    def tracer(self, bucket: Bucket, width: int | None = None) -> Tracer:
        """Trace the model at a bucket: its op calls and the kernels selected."""
        return self.loaded.tracer(bucket, self.limits, table_width=width)

    def ops(
        self, bucket: Bucket, width: int | None = None, name: str = "advance"
    ) -> Ops:
        """Return the resolved ops of a bucket; exact sizes share those of a class.

        name: of the program, if it is one of :data:`OF_THEIR_OWN`.
        """
        key = bound_bucket(bucket, self.limits), width, name, self.is_tapped
        if key not in self._ops:
            loaded = self._pooled if name == "pool" else self._tapped
            tracer = loaded.tracer(
                key[0], self.limits, table_width=width, is_scored=name == "score"
            )
            self._ops[key] = ResolvedOps(tracer)
        return cast("Ops", self._ops[key].at(bucket))

    @property
    def program_keys(self) -> list[tuple[str, Bucket]]:
        """Name and bucket of each compiled program."""
        return [(name, bucket) for name, bucket, *_ in self._programs]

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Load an adapter in place of the one that has its number."""
        loaded = self.loaded
        assert loaded.adapters is not None, "the limits have room for adapters"
        weights = loaded.adapters.load(loaded.weights, number, adapter)
        if weights is loaded.weights:
            return
        self.loaded = replace(loaded, weights=weights)
        if self.backend.offers(WeightUpdates) is None:
            # Programs may refer to the tensors that they were compiled with.
            self._programs.clear()

    def release(self) -> None:
        """Drop programs, state and weights."""
        self._drop_state()
        self.transfers.release()
        self.loaded = replace(self.loaded, weights=None)
        # The backend's own may refer to the weights.
        self._model = self._untapped = self.loaded.model

    @property
    def _tapped(self) -> Loaded:
        """The loaded model, without taps in steps that return none."""
        return self.loaded if self.is_tapped else replace(self.loaded, taps=())

    def _drop_state(self) -> None:
        """Drop the state, and the programs, which may refer to it."""
        self._programs.clear()
        self.taps = None
        self.state = NO_STATE


def computed_model(backend: Backend, loaded: Loaded) -> Model:
    """Return the model that a backend computes in place of the loaded one."""
    whole = used_whole_models(backend, loaded)
    return loaded.model if whole is None else whole.replace(loaded.model)


def used_whole_models(backend: Backend, loaded: Loaded) -> WholeModels | None:
    """Return the capability if programs use it: not for what only ops compute."""
    whole = backend.offers(WholeModels)
    by_ops = loaded.taps or loaded.ends_before_head or loaded.selection.invariant
    return None if whole is None or (whole.optional and by_ops) else whole


def bound_bucket(bucket: Bucket, limits: Limits) -> Bucket:
    """Return the bucket whose kernels a program binds: a size class of exact sizes."""
    return bucket if limits.buckets else size_class(bucket)


def bound_tracer(loaded: Loaded, bucket: Bucket, limits: Limits) -> Tracer:
    """Trace a step of ``bucket`` with the kernels that its program binds."""
    bound = loaded.tracer(bound_bucket(bucket, limits), limits)
    if bound.bucket == bucket:
        return bound
    return loaded.tracer(bucket, limits, choices=bound.choices)


def _program_name(bucket: Bucket) -> str:
    """Return the name of the program that computes and samples a step."""
    return "repeat" if bucket.repeat > 1 else "advance"


def size_class(bucket: Bucket) -> Bucket:
    """Return the representative of an exact size, see :data:`SIZE_CLASSES`."""
    single = bucket.rows >= bucket.tokens
    alike = [b for b in SIZE_CLASSES if (b.rows == b.tokens) == single]
    fits = [b for b in alike if bucket.tokens <= b.tokens]
    found = (fits or alike[-1:])[0]._replace(
        tokens_per_row=bucket.tokens_per_row,
        sampler=bucket.sampler,
        repeat=bucket.repeat,
    )
    if bucket.verifies and not found.verifies:
        return found._replace(rows=found.tokens)
    return found


def _admit(ops: Ops, messages: Any, state: Any) -> tuple[Any]:
    return (state._replace(tables=ops.admit(messages, state.tables)),)


def _set_token_bias(ops: Ops, message: Any, state: Any) -> tuple[Any]:
    return (state._replace(tables=ops.set_token_bias(message, state.tables)),)


def _sample_masked(
    ops: Ops, logits: Any, masks: Any, step: Any, state: Any
) -> tuple[Any, Any]:
    masked = ops.mask_logits(logits, masks)
    return sample(ops, masked, step, state, scored=logits)
