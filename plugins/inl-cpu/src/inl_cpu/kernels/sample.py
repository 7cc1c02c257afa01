"""Choosing tokens, and telling how likely they were."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.step import TOP, Scores, Step, Tables
from inl_cpu.abi import Flag, Opcode
from inl_cpu.command_emitter import stride
from inl_cpu.kernels.fallback import run_body
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import Stage

SAMPLERS = {
    "greedy": Flag.SAMPLE_GREEDY,
    "sample": Flag.SAMPLE_DRAW,
    "sample_filtered": Flag.SAMPLE_FULL,
}


def sample(
    stage: Stage, logits: Any, step: Step, tables: Tables, *, sampler: str
) -> tuple[Any, Tables]:
    logits = stage.dense(logits)
    if sampler == "sample_filtered":
        logits = _penalized(stage, logits, step, tables)
    samples, vocab = logits.shape
    tokens = stage.new((samples,), np.int32)
    dims = [samples, vocab, stride(logits), samples // step.slots.shape[0]]
    data = [logits, tokens, step.slots, tables.last, tables.params, step.uniforms]
    stage.emit(Opcode.CHOOSE, dims, data, flags=int(SAMPLERS[sampler]))
    return tokens, tables


def _penalized(stage: Stage, logits: Any, step: Step, tables: Tables) -> Any:
    # The scores are those of the logits as they were.
    changed = stage.copied(logits)
    rows, vocab = logits.shape
    fed = stage.new((rows,), np.int32)
    inputs = [step.tokens, step.starts, step.slots, step.used_counts]
    given = [plain(x) for x in inputs]
    stage.python(partial(count_fed, plain(fed), given, tables.token_counts), inputs)
    data = [changed, step.slots, tables.params, tables.token_counts, tables.bias, fed]
    stage.emit(Opcode.PENALIZE, [rows, vocab, vocab, 0], data)
    return changed


def count_fed(fed: Any, arrays: list[Any], held: Any) -> None:
    """Count the fed token of each decoding row as one more of its answer.

    Here, because how many rows decode is data of the step.
    """
    tokens, starts, slots, counts = arrays
    np.take(tokens, np.minimum(starts[:-1], tokens.shape[0] - 1), out=fed)
    decoding = int(counts[0])
    held[slots[:decoding], fed[:decoding]] += 2


def score(stage: Stage, logits: Any, tokens: Any) -> Scores:
    shapes = catalog()["score"].shapes
    assert shapes is not None, "score is a primitive"
    results = Scores(*(stage.new(s.shape, s.dtype) for s in shapes(logits, tokens)))
    given, targets = (plain(logits), plain(tokens)), [plain(x) for x in results]
    stage.python(partial(_tell, *given, targets), [logits, tokens])
    return results


def _tell(logits: Any, tokens: Any, targets: list[Any]) -> None:
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    for row, values in enumerate(logits):
        targets[1][row] = likeliest(values, targets[1].shape[1])
    targets[0][:] = np.take_along_axis(logs, tokens[:, None], -1)[:, 0]
    targets[2][:] = np.take_along_axis(logs, targets[1], -1)


def likeliest(values: Any, count: int = TOP) -> Any:
    """Ids of the largest values, largest first, equal ones by id; no full sort."""
    if count >= values.shape[0]:
        return np.argsort(-values, kind="stable")[:count]
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)]
    found = np.sort(np.concatenate([above, equal]))
    return found[np.argsort(-values[found], kind="stable")]


def kernels(stage: Stage) -> Iterable[Kernel]:
    """Choice natively; scores without a sort of the whole vocabulary."""
    mask = partial(run_body, stage, catalog()["mask_logits"])
    yield Kernel("mask_logits", "elementwise", mask, invariant=True)
    yield Kernel("sample", "native", partial(sample, stage), invariant=True)
    yield Kernel("score", "partition", partial(score, stage), invariant=True)
