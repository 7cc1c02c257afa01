"""Token sampling and scoring."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.step import Scores, Step, Tables
from inl_cpu.abi import Flag
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Penalize, Sample, Score
from inl_cpu.kernels.fallback import run_body
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import CommandEmitter

SAMPLER_FLAGS = {
    "greedy": Flag.SAMPLE_GREEDY,
    "sample": Flag.SAMPLE_RANDOM,
    "sample_filtered": Flag.SAMPLE_FILTERED,
}


def sample(
    emitter: CommandEmitter, logits: Any, step: Step, tables: Tables, *, sampler: str
) -> tuple[Any, Tables]:
    logits = emitter.dense(logits)
    if sampler == "sample_filtered":
        logits = _penalized(emitter, logits, step, tables)
    samples, vocabulary = logits.shape
    tokens = emitter.new((samples,), np.int32)
    emitter.emit(
        Sample(
            samples=samples,
            vocabulary=vocabulary,
            logits_stride=stride(logits),
            row_samples=samples // step.slots.shape[0],
            logits=logits,
            tokens=tokens,
            slots=step.slots,
            last=tables.last,
            params=tables.params,
            uniforms=step.uniforms,
            flags=int(SAMPLER_FLAGS[sampler]),
        )
    )
    return tokens, tables


def _penalized(emitter: CommandEmitter, logits: Any, step: Step, tables: Tables) -> Any:
    # A copy, because scores are computed from the original logits.
    penalized = emitter.copied(logits)
    rows, vocabulary = logits.shape
    fed = emitter.new((rows,), np.int32)
    inputs = [step.tokens, step.starts, step.slots, step.used_counts]
    given = [plain(x) for x in inputs]
    counts = plain(tables.token_counts)
    emitter.python(partial(count_fed, plain(fed), given, counts), inputs)
    emitter.emit(
        Penalize(
            rows=rows,
            vocabulary=vocabulary,
            logits_stride=vocabulary,
            decode_rows=0,
            logits=penalized,
            slots=step.slots,
            params=tables.params,
            counts=tables.token_counts,
            bias=tables.bias,
            fed=fed,
        )
    )
    return penalized


def count_fed(fed: Any, arrays: list[Any], token_counts: Any) -> None:
    """Count the input token of each decoding row as generated, and store it in ``fed``.

    Done in Python, because the number of decoding rows is data of the step.
    """
    tokens, starts, slots, counts = arrays
    np.take(tokens, np.minimum(starts[:-1], tokens.shape[0] - 1), out=fed)
    decode_rows = int(counts[0])
    token_counts[slots[:decode_rows], fed[:decode_rows]] += 2


def score(emitter: CommandEmitter, logits: Any, tokens: Any) -> Scores:
    shapes = catalog()["score"].shapes
    assert shapes is not None, "score is a primitive"
    scores = Scores(*(emitter.new(s.shape, s.dtype) for s in shapes(logits, tokens)))
    logits = emitter.dense(logits)
    rows, vocabulary = logits.shape
    emitter.emit(
        Score(
            rows=rows,
            vocabulary=vocabulary,
            logits_stride=stride(logits),
            count=scores.ids.shape[1],
            logits=logits,
            tokens=emitter.dense(tokens),
            chosen=scores.chosen,
            ids=scores.ids,
            values=scores.values,
        )
    )
    return scores


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Native sampling and scores."""
    mask = partial(run_body, emitter, catalog()["mask_logits"])
    yield Kernel("mask_logits", "numpy_elementwise", mask, invariant=True)
    yield Kernel("sample", "native", partial(sample, emitter), invariant=True)
    yield Kernel("score", "native", partial(score, emitter), invariant=True)
