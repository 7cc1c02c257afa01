"""Benchmark of an engine: prefill and decode speed, and bytes read per step."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import SIZES
from inl.errors import RequestError
from inl.spec.cache import Paged
from inl.spec.op import nbytes
from inl.spec.tree import leaves
from inl.weights.plan import WeightPlan

if TYPE_CHECKING:
    from inl.engine.core import StepRecord
    from inl.engine.inference_engine import InferenceEngine
    from inl.runners.local_runner import Loaded, LocalRunner

MIN_STEPS = 2
"""Minimum number of timed steps: a speed needs an interval."""


class Spread(NamedTuple):
    """Median and range of one quantity over several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Speed(NamedTuple):
    """Speed at one batch size, over all runs."""

    batch: int
    first_token_seconds: Spread
    """Time until every sequence has its first token."""
    prefill: Spread
    """Prompt tokens per second, over that time."""
    decode: Spread | None
    """Generated tokens per second of all sequences, over the steps in which all
    decode; ``None`` if there were fewer than two."""


class Traffic(NamedTuple):
    """Bytes that one decoding step reads, by the size of the packed weights."""

    weights: int
    """Read once per step, for any batch size."""
    cache_per_token: int
    """Keys and values of one cached token in all layers."""

    def step(self, batch: int, cached_tokens: float) -> float:
        """Return the bytes of a step over ``batch`` sequences of ``cached_tokens``."""
        return self.weights + batch * cached_tokens * self.cache_per_token


class StepClock:
    """Times the steps in which every sequence decodes."""

    def __init__(self) -> None:
        self._batch = 0
        self._times: list[float] = []

    def begin(self, batch: int) -> None:
        """Discard all times and start over, for ``batch`` sequences."""
        self._batch, self._times = batch, []

    def on_step(self, record: StepRecord) -> None:
        """Record a step; the engine's ``on_step`` callback."""
        if record.decode_rows == record.rows == self._batch:
            self._times.append(time.perf_counter())

    def tokens_per_second(self) -> float | None:
        """Return the decode speed of all sequences, ``None`` for too few steps."""
        if len(self._times) < MIN_STEPS:
            return None
        seconds = self._times[-1] - self._times[0]
        return self._batch * (len(self._times) - 1) / seconds


def measure_speed(
    engine: InferenceEngine,
    clock: StepClock,
    *,
    batch: int,
    prompt_tokens: int,
    tokens: int,
    runs: int,
    tick: Callable[[], None] = lambda: None,
) -> Speed:
    """Time ``batch`` prompts of random tokens, once to warm up and ``runs`` times.

    Runs share no blocks. The engine must call ``clock.on_step``. prompt_tokens,
    tokens: lengths of each prompt and output. tick: called after each of the
    ``runs + 1`` runs. Raises :class:`~inl.errors.RequestError` if prompt and output
    exceed the context.
    """
    if prompt_tokens + tokens > engine.context:
        raise RequestError(
            f"bench: found {prompt_tokens} + {tokens} tokens, the context holds "
            f"{engine.context}; lower --prompt-tokens or --tokens"
        )
    firsts: list[float] = []
    decodes: list[float] = []
    for run in range(runs + 1):
        prompts = random_prompts(engine, batch, prompt_tokens, seed=run)
        clock.begin(batch)
        completions = engine.generate(
            prompts,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0,
            repetition_penalty=1,
        )
        tick()
        if run == 0:
            continue
        firsts.append(max(each.first_token_seconds for each in completions))
        speed = clock.tokens_per_second()
        decodes += [] if speed is None else [speed]
    prefill = Spread.of([batch * prompt_tokens / seconds for seconds in firsts])
    decode = Spread.of(decodes) if decodes else None
    return Speed(batch, Spread.of(firsts), prefill, decode)


class Repeated(NamedTuple):
    """Prompts that were computed before, of which tiers may have blocks."""

    first_token_seconds: float
    cached_tokens: int
    hits: dict[str, int]
    """Blocks that were read from each tier."""


def measure_repeated(
    engine: InferenceEngine, *, batch: int, prompt_tokens: int
) -> Repeated:
    """Send the prompts of the first timed run of :func:`measure_speed` again."""
    assert engine.tiers is not None, "there are tiers"
    prompts = random_prompts(engine, batch, prompt_tokens, seed=1)
    before = engine.tiers.hits.copy()
    found = engine.generate(prompts, max_tokens=1, ignore_eos=True, temperature=0)
    return Repeated(
        max(each.first_token_seconds for each in found),
        sum(each.cached_tokens for each in found),
        dict(engine.tiers.hits - before),
    )


def random_prompts(
    engine: InferenceEngine, batch: int, length: int, *, seed: int
) -> list[list[int]]:
    """Return prompts of uniformly random tokens, which share no prefixes."""
    generator = random.Random(seed)
    vocab = engine.runner.limits.vocab
    return [[generator.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def traffic(runner: LocalRunner) -> Traffic:
    """Return the bytes that a decoding step reads, by the runner's tensors.

    A weight group counts for at most its logical size in the compute dtype, because a
    kernel may hold views of its own tensors. Embeddings are left out: a step reads
    one row per token.
    """
    loaded = runner.loaded
    sizes: dict[tuple[str, ...], int] = {}
    for plan, weights in _pairs(loaded.groups, loaded.weights):
        if plan.group.op != "embedding":
            sources = tuple(param.source for param in plan.group.params.values())
            logical = nbytes(plan.specs(loaded.config.dtype))
            sizes[sources] = min(logical, _stored_bytes(weights, logical))
    return Traffic(sum(sizes.values()), _cache_bytes(loaded))


def _pairs(groups: Any, weights: Any) -> Iterator[tuple[WeightPlan, Any]]:
    if isinstance(groups, WeightPlan):
        yield groups, weights
    elif isinstance(groups, Mapping):
        for name, group in groups.items():
            yield from _pairs(group, weights[name])
    elif isinstance(groups, tuple):
        for group, part in zip(groups, weights, strict=True):
            yield from _pairs(group, part)


def _stored_bytes(weights: Any, default: int) -> int:
    """Bytes of a group's tensors on any framework; ``default`` for an unknown dtype."""
    total = 0
    for leaf in leaves(weights):
        name = str(leaf.dtype).rpartition(".")[2]
        if name not in SIZES:
            return default
        total += SIZES[name] * math.prod(leaf.shape)
    return total


def _cache_bytes(loaded: Loaded) -> int:
    return sum(
        len(item.layers) * item.token_bytes
        for item in loaded.model.state(loaded.config)
        if isinstance(item, Paged)
    )
