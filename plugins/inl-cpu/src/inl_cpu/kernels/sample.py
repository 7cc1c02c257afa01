"""Token sampling and scoring."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.step import TOP, Scores, Step, Tables
from inl_cpu.abi import Flag
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Penalize, Sample
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


PART = 64
"""Logits of which one maximum is taken, to find the most likely tokens."""


def score(emitter: CommandEmitter, logits: Any, tokens: Any) -> Scores:
    shapes = catalog()["score"].shapes
    assert shapes is not None, "score is a primitive"
    results = Scores(*(emitter.new(s.shape, s.dtype) for s in shapes(logits, tokens)))
    given, targets = (plain(logits), plain(tokens)), [plain(x) for x in results]
    emitter.python(partial(_score, *given, targets), [logits, tokens])
    return results


def _score(logits: Any, tokens: Any, targets: list[Any]) -> None:
    # A row with invalid logits has token -1, and the scores of its last token.
    # Row by row: a row fits the cache, and a prompt's logits are many megabytes.
    for row, (values, token) in enumerate(zip(logits, tokens.tolist(), strict=True)):
        ids = targets[1][row] = top_tokens(values, targets[1].shape[1])
        with np.errstate(invalid="ignore"):
            largest = values.max()
            total = np.log(np.exp(values - largest).sum())
            targets[0][row] = values[token] - largest - total
            targets[2][row] = values[ids] - largest - total


def top_tokens(values: Any, count: int = TOP) -> Any:
    """Ids of the largest values in descending order, ties by id; no full sort.

    NaN comes last.
    """
    if count >= values.shape[0] or np.isnan(values.max()):
        return np.argsort(-values, kind="stable")[:count]
    # The largest values of `count` parts are no more than the largest `count` values.
    parts, whole = values.shape[0] // PART, values.shape[0] // PART * PART
    if parts >= count:
        most = values[:whole].reshape(PART, parts).max(0)
        likely = np.flatnonzero(values >= np.partition(most, -count)[-count])
    else:
        likely = np.arange(values.shape[0])
    ids = likely[np.argsort(-values[likely], kind="stable")]
    return ids[:count]


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Native sampling; scores without sorting the whole vocabulary."""
    mask = partial(run_body, emitter, catalog()["mask_logits"])
    yield Kernel("mask_logits", "elementwise", mask, invariant=True)
    yield Kernel("sample", "native", partial(sample, emitter), invariant=True)
    yield Kernel("score", "partition", partial(score, emitter), invariant=True)
