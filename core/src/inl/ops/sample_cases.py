"""Test cases of the sampling ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from inl.dtypes import rounded
from inl.ops.attention import random_step
from inl.ops.step import empty_tables
from inl.spec.op import Case
from inl.spec.step import NEUTRAL, PARAMS, Step, Tables

UNIFORMS = (0.1, 0.62, 0.9999, 0.5)
"""Uniform numbers of the four rows."""

MARGIN = 1e-5
"""Change of uniform numbers, top-p and min-p that must not change a case's tokens, so
that rounding in float32 does not either."""

EDGES: dict[str, Sequence[float]] = {
    "temperature": (0.0, 1e-6, 30.0),
    "top_k": (0.0, 1.0, 3.0, 257.0, 2.0**24),
    "top_p": (1e-6, 0.35, 0.9, 1.0),
    "min_p": (0.0, 0.02, 0.3, 1.0),
    "repetition_penalty": (0.5, 1.0, 1.7),
    "presence_penalty": (-2.0, 0.0, 1.3),
    "frequency_penalty": (-2.0, 0.0, 0.7),
}
"""Tested values of each parameter, including the neutral one and the limits."""


def _step(rng: np.random.Generator, vocab: int) -> tuple[Step, Tables]:
    """Return a step with a decoding row, two prompts and a padding row."""
    step, _ = random_step(rng, [3, 0, 5], [1, 4, 1], pad_rows=1)
    uniforms = np.array(UNIFORMS, np.float32).view(np.int32)
    tokens = rng.integers(0, vocab, step.tokens.shape).astype(np.int32)
    counts = np.array([1, *step.used_counts[1:]], np.int32)
    step = step._replace(uniforms=uniforms, tokens=tokens, used_counts=counts)
    tables = empty_tables(
        groups=1, slots=4, max_blocks_per_seq=step.blocks.shape[-1], vocab=vocab
    )
    seen = rng.random((3, vocab)) < 0.4
    tables.token_counts[1:] = np.where(seen, rng.integers(0, 6, (3, vocab)), 0)
    tables.params[1:] = NEUTRAL
    return step, tables


def _logits(rng: np.random.Generator, vocab: int) -> Any:
    return 3 * rng.standard_normal((4, vocab))


def _plain(rng: np.random.Generator, sampler: str, vocab: int) -> Case:
    step, tables = _step(rng, vocab)
    tables.params[:, 0] = [0.0, 0.7, 0.0, 1.3]
    args = _logits(rng, vocab), step, tables
    return Case(f"{sampler}/{vocab}", args, {"sampler": sampler})


def _edge(rng: np.random.Generator, name: str, value: float) -> Case:
    step, tables = _step(rng, 257)
    tables.params[1:, 0] = [0.8, 1.0, 1.2]
    tables.params[1:, PARAMS.index(name)] = value
    args = _logits(rng, 257), step, tables
    return Case(
        f"sample_filtered/{name}/{value:g}", args, {"sampler": "sample_filtered"}
    )


def _combined(rng: np.random.Generator, temperature: float) -> Case:
    """Return a case that combines random values of all parameters with biases."""
    step, tables = _step(rng, 257)
    for row in (1, 2, 3):
        tables.params[row] = [rng.choice(values) for values in EDGES.values()]
    tables.params[1:, 0] = temperature
    biased = rng.random((3, 257)) < 0.1
    tables.bias[1:] = np.where(biased, 4 * rng.standard_normal((3, 257)), 0)
    args = _logits(rng, 257), step, tables
    return Case(
        f"sample_filtered/together/{temperature:g}",
        args,
        {"sampler": "sample_filtered"},
    )


def decided(make: Callable[..., Case], *args: Any) -> Case:
    """Return a case whose tokens do not change by rounding in any storage dtype."""
    from inl.ops.sample import is_decided

    while True:
        case = make(*args)
        logits, step, tables = case.args
        stored = [
            rounded(logits, dtype).astype(np.float64)
            for dtype in ("float32", "bfloat16", "float16")
        ]
        sampler = case.attrs["sampler"]
        if sampler == "greedy" or is_decided(
            stored, step, tables, MARGIN, full=sampler == "sample_filtered"
        ):
            return case


def decided_case(rng: np.random.Generator, sampler: str, vocab: int) -> Case:
    """Return a case of ``vocab`` columns whose tokens do not change by rounding."""
    return decided(_plain, rng, sampler, vocab)


def _non_finite(rng: np.random.Generator, sampler: str) -> Case:
    """Return a case of rows with NaN, with infinity, without a finite logit, and of a
    row that has one finite logit.
    """
    step, tables = _step(rng, 257)
    tables.params[1:, 0] = [0.7, 0.0, 1.3]
    logits = _logits(rng, 257)
    logits[0, 131] = np.nan
    logits[1, 256] = np.inf
    logits[2] = -np.inf
    logits[3, np.arange(257) != 19] = -np.inf
    args = logits, step, tables
    return Case(f"{sampler}/non-finite", args, {"sampler": sampler}, since=(1, 2))


def sample_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of every sampler, of parameters at their limits, of ties and of bans."""
    for vocab in (5, 257):
        for sampler in ("greedy", "sample", "sample_filtered"):
            yield decided_case(rng, sampler, vocab)
    step, tables = _step(rng, 5)
    ties = np.array([[1, 2, 2, 0, 2.0]] * 4)
    for sampler in ("greedy", "sample", "sample_filtered"):
        yield Case(f"{sampler}/ties", (ties, step, tables), {"sampler": sampler})
    tables = tables._replace(params=tables.params.copy())
    tables.params[1:, 0] = 1.0
    tables.params[1:, 1] = [1, 2, 0]
    tables.params[1:, 3] = [0, 0, 1]
    yield Case(
        "sample_filtered/ties/filtered",
        (ties, step, tables),
        {"sampler": "sample_filtered"},
    )
    for sampler in ("greedy", "sample", "sample_filtered"):
        yield _non_finite(rng, sampler)
    for name, values in EDGES.items():
        for value in values:
            yield decided(_edge, rng, name, value)
    yield decided(_combined, rng, 0.0)
    yield decided(_combined, rng, 0.9)
    step, tables = _step(rng, 257)
    tables.params[1:, 0] = [0.0, 1.0, 50.0]
    tables.bias[1:] = -1e9
    tables.bias[[1, 2, 3], [200, 0, 256]] = 0
    yield Case(
        "sample_filtered/all banned but one",
        (_logits(rng, 257), step, tables),
        {"sampler": "sample_filtered"},
    )


def score_cases(rng: np.random.Generator) -> Iterable[Case]:
    """Cases of vocabularies around TOP tokens, of ties and of a certain token."""
    for vocab in (5, 20, 257):
        tokens = rng.integers(0, vocab, 4).astype(np.int32)
        yield Case(f"4x{vocab}", (_logits(rng, vocab), tokens))
    ties = np.repeat([[0.0, 1.0, -0.0]], 2, 0)[:, rng.integers(0, 3, 64)]
    yield Case("ties", (ties, np.array([3, 9], np.int32)))
    certain = np.where(np.arange(40) == 17, 80.0, -80.0)[None]
    yield Case("certain", (certain, np.array([17], np.int32)))
