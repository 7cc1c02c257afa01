"""Executes the program of an encoder on one backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.programs import compile_program, info_of
from inl.dtypes import cast, widen, wrap
from inl.executor.load_plan import compute_dtype, in_dtype, kernel_selection
from inl.ops.full_attention import starts_of
from inl.progress import Progress, ProgressReporter
from inl.protocol.runner import Limits
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.encoder import (
    Encoder,
    SequenceBatch,
    TokenSequence,
    encode,
    encode_part,
)
from inl.spec.step import Bucket
from inl.spec.tree import tree_map
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import plan_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.backend.base import Backend
    from inl.config import EngineConfig
    from inl.dtypes import HostArray
    from inl.executor.model_loader import LanguageModel
    from inl.executor.vision_model import VisionModel
    from inl.spec.selection import KernelSelection

MAX_SEQUENCES = 64
"""Most sequences of a program."""

LEAST_TOKENS = 16
"""Tokens of the smallest program of a backend with static shapes."""

EXACT = Bucket(tokens=64, rows=4)
"""Size whose kernels a backend without static shapes uses for every size."""


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder with its weights on a device."""

    model: Encoder
    config: Any
    groups: Any
    weights: Any
    selection: KernelSelection


class EncoderExecutor:
    """An encoder's weights and compiled programs on one backend."""

    def __init__(self, backend: Backend, loaded: LoadedEncoder, limits: Limits) -> None:
        self.backend, self.loaded, self.limits = backend, loaded, limits
        self._has_static_shapes = bool(backend.buckets(limits))
        self._ops: dict[Bucket, ResolvedOps] = {}
        self._programs: dict[tuple[Bucket, int | None], Any] = {}
        """By bucket and part; ``None`` computes all parts."""

    def encode(self, sequences: Sequence[TokenSequence]) -> NDArray[np.float32]:
        """Return the results [n, K] of up to :data:`MAX_SEQUENCES` sequences."""
        lengths = [len(each.tokens) for each in sequences]
        bucket = self.bucket(sum(lengths), len(lengths))
        (results,) = self.compute(padded(sequences, bucket), bucket)
        return results[: len(lengths)]

    def compute(
        self, batch: SequenceBatch, bucket: Bucket
    ) -> list[NDArray[np.float32]]:
        """Return the results of a batch on the host, which fills ``bucket``."""
        results = self.program(bucket)(self.loaded.weights, self._tensors(batch))
        return self.on_host(results)

    def begin(self, batch: SequenceBatch, bucket: Bucket) -> PartialEncoding:
        """Return a batch, which fills ``bucket``, to be computed in parts."""
        return PartialEncoding(self, self._tensors(batch), bucket)

    def _tensors(self, batch: SequenceBatch) -> SequenceBatch:
        tensors: SequenceBatch = tree_map(self._tensor, batch)
        return tensors

    def on_host(self, results: Sequence[Any]) -> list[NDArray[np.float32]]:
        """Return results of a program on the host."""
        numpy = self.backend.numpy
        return [np.asarray(widen(numpy(each)), np.float32) for each in results]

    def release(self) -> None:
        """Drop programs and weights."""
        self._programs.clear()
        self._ops.clear()
        self.loaded = replace(self.loaded, weights=None)

    def tracer(self, bucket: Bucket) -> Tracer:
        """Trace the program of a bucket: its op calls and the kernels selected."""
        loaded = self.loaded
        tracer = Tracer(loaded.selection, bucket, self.limits.block_size)
        batch = loaded.model.specs(loaded.config, bucket)
        specs = tree_map(lambda plan: plan.specs(loaded.config.dtype), loaded.groups)
        encode(tracer, loaded.model, loaded.config, specs, batch)
        return tracer

    def _tensor(self, x: NDArray[Any]) -> Any:
        dtype = self.loaded.config.dtype
        return self.backend.tensor(wrap(x) if x.dtype == np.int32 else cast(x, dtype))

    def bucket(self, tokens: int, rows: int) -> Bucket:
        """Return the size of the program of so many tokens and sequences."""
        if not self._has_static_shapes:
            return Bucket(tokens=tokens, rows=rows)
        size = LEAST_TOKENS
        while size < tokens:
            size *= 2
        return Bucket(tokens=size, rows=1 if rows == 1 else MAX_SEQUENCES)

    def program(self, bucket: Bucket, part: int | None = None) -> Any:
        """Return the compiled program of a bucket, or of one part of it."""
        # Without static shapes one program computes every size.
        size = bucket if self._has_static_shapes else EXACT
        if (size, part) not in self._programs:
            if size not in self._ops:
                self._ops[size] = ResolvedOps(self.tracer(size))
            given = self._ops[size], self.loaded.model, self.loaded.config
            if part is None:
                name, body = "encode", partial(encode, *given)
            else:
                name, body = "encode_part", partial(encode_part, *given, part)
            info = info_of(name, None, self.limits)
            program = compile_program(self.backend, body, info)
            self._programs[size, part] = program
        return self._programs[size, part]


class PartialEncoding:
    """A batch that is computed in parts: before the layers, each layer, the results.

    All of it is one part where the encoder has no ``layers``.
    """

    def __init__(
        self, executor: EncoderExecutor, batch: SequenceBatch, bucket: Bucket
    ) -> None:
        self._executor, self._batch, self._bucket = executor, batch, bucket
        loaded = executor.loaded
        in_layers = loaded.model.layers is not None
        self.parts = loaded.config.layers + 2 if in_layers else 1
        """Number of all parts."""
        self.computed = 0
        """Number of parts that have been computed."""
        self._arrays: Any = ()

    @property
    def is_done(self) -> bool:
        """Whether all parts have been computed."""
        return self.computed == self.parts

    def advance(self, parts: int) -> None:
        """Compute the next ``parts`` parts, or all that are left, and wait for them."""
        executor = self._executor
        if self.parts == 1:
            program = executor.program(self._bucket)
            self._arrays = program(executor.loaded.weights, self._batch)
            self.computed = 1
            return
        row = None
        for part in range(self.computed, min(self.computed + parts, self.parts)):
            row, self._arrays = executor.program(self._bucket, part)(
                executor.loaded.weights, self._batch, self._arrays
            )
            self.computed = part + 1
        if row is not None:
            executor.backend.numpy(row)

    def results(self) -> list[HostArray]:
        """Return the results on the host, once all parts have been computed."""
        numpy = self._executor.backend.numpy
        return [numpy(each) for each in self._arrays]


def padded(sequences: Sequence[TokenSequence], bucket: Bucket) -> SequenceBatch:
    """Return the arrays of a batch in the size of a bucket, on the host."""
    lengths = [len(each.tokens) for each in sequences]
    used = sum(lengths)
    tokens, positions, kinds = np.zeros((3, bucket.tokens), np.int32)
    tokens[:used] = np.concatenate([each.tokens for each in sequences])
    positions[:used] = np.concatenate([np.arange(length) for length in lengths])
    kinds[:used] = np.concatenate([
        each.kinds or np.zeros(len(each.tokens), np.int32) for each in sequences
    ])  # fmt: skip
    starts = starts_of([*lengths, *[0] * (bucket.rows - len(lengths))])
    return SequenceBatch(tokens, positions, kinds, starts)


def load_encoder(
    language: LanguageModel | VisionModel,
    backend: Backend,
    config: EngineConfig,
    progress: Progress | None = None,
) -> EncoderExecutor:
    """Load an encoder's weights on a backend.

    Raises :class:`~inl.errors.NoKernel`, which names the op, on a backend without the
    ops of encoders, before weights are read.
    """
    model, dtype = language.encoder, compute_dtype(backend, config.dtype)
    assert model is not None, "others are loaded by a LoadPlan"
    backend = in_dtype(backend, dtype)
    shaped = replace(language.config, dtype=dtype)
    selection = kernel_selection(backend, config)
    groups = plan_weights(
        model.weights(shaped), selection.kernels, stored_specs(language.checkpoint),
        invariant=selection.invariant,
    )  # fmt: skip
    limits = encoder_limits(shaped, backend, config)
    loaded = LoadedEncoder(model, shaped, groups, None, selection)
    ResolvedOps(EncoderExecutor(backend, loaded, limits).tracer(EXACT))
    weights = load_weights(
        groups, language.checkpoint, backend, dtype, check=config.check_weights,
        progress=ProgressReporter(progress),
    )  # fmt: skip
    return EncoderExecutor(backend, replace(loaded, weights=weights), limits)


def encoder_limits(shaped: Any, backend: Backend, config: EngineConfig) -> Limits:
    """Return limits of a runner of sequences, which has no cache and takes no steps."""
    budget = config.token_budget or backend.traits.token_budget
    return Limits(
        slots=2, blocks=(2,), block_size=shaped.max_tokens, max_blocks_per_seq=1,
        vocab=shaped.vocab_size, depth=1, token_budget=max(budget, shaped.max_tokens),
        sampler="greedy",
    )  # fmt: skip
