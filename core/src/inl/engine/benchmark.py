"""What a benchmark of an engine finds: times of its phases, and bytes that it moves."""

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
    from inl.executor.local_runner import Loaded, LocalRunner

FEWEST_STEPS = 2
"""Full steps whose times say anything."""


class Spread(NamedTuple):
    """Several runs of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Speed(NamedTuple):
    """One batch size over all runs."""

    batch: int
    first_token_seconds: Spread
    """Until every sequence has its first token."""
    prefill: Spread
    """Tokens of prompts a second, over that time."""
    decode: Spread | None
    """Tokens a second of all sequences, over the steps in which all decode;
    ``None`` where there were fewer than two."""


class Traffic(NamedTuple):
    """Bytes that one decoding step must read, by what its kernels keep."""

    weights: int
    """Read once a step, however many sequences share it."""
    cache_per_token: int
    """Keys and values of one cached token, all layers."""

    def step(self, batch: int, cached_tokens: float) -> float:
        """Bytes of a step: ``batch`` sequences with ``cached_tokens`` each."""
        return self.weights + batch * cached_tokens * self.cache_per_token


class StepClock:
    """Notes when steps are submitted in which every sequence decodes."""

    def __init__(self) -> None:
        self._batch = 0
        self._times: list[float] = []

    def begin(self, batch: int) -> None:
        """Start anew, for ``batch`` sequences."""
        self._batch, self._times = batch, []

    def on_step(self, record: StepRecord) -> None:
        """Hear of a step from the engine."""
        if record.decode_rows == record.rows == self._batch:
            self._times.append(time.perf_counter())

    def tokens_per_second(self) -> float | None:
        """Tokens of all sequences a second, or ``None`` for too few steps."""
        if len(self._times) < FEWEST_STEPS:
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
    """Answer ``batch`` prompts of random tokens, once to warm up and ``runs`` times.

    The engine must have no prefix cache and call ``clock.on_step``. ``tick`` is told
    after each of the ``runs + 1`` turns. Raises
    :class:`~inl.errors.RequestError` where prompt and answer exceed the context.
    """
    if prompt_tokens + tokens > engine.context:
        raise RequestError(
            f"bench: {prompt_tokens} + {tokens} tokens, the context is "
            f"{engine.context}; lower --prompt-tokens or --tokens"
        )
    firsts: list[float] = []
    decodes: list[float] = []
    for turn in range(runs + 1):
        prompts = random_prompts(engine, batch, prompt_tokens, seed=turn)
        clock.begin(batch)
        found = engine.generate(prompts, max_tokens=tokens, ignore_eos=True)
        tick()
        if turn == 0:
            continue
        firsts.append(max(each.first_token_seconds for each in found))
        speed = clock.tokens_per_second()
        decodes += [] if speed is None else [speed]
    prefill = Spread.of([batch * prompt_tokens / seconds for seconds in firsts])
    decode = Spread.of(decodes) if decodes else None
    return Speed(batch, Spread.of(firsts), prefill, decode)


def random_prompts(
    engine: InferenceEngine, batch: int, length: int, *, seed: int
) -> list[list[int]]:
    """Prompts of tokens drawn evenly from the vocabulary: no text, so no luck."""
    draw = random.Random(seed)
    vocab = engine.runner.limits.vocab
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def traffic(runner: LocalRunner) -> Traffic:
    """Count what a decoding step reads, by the tensors that the runner holds.

    A group counts for no more than its logical size in the compute dtype, because a
    kernel may hold views of its own tensors. Embeddings are left out: a step reads a
    row a token.
    """
    loaded = runner.loaded
    sizes: dict[tuple[str, ...], int] = {}
    for planned, held in _pairs(loaded.groups, loaded.weights):
        if planned.group.op != "embedding":
            sources = tuple(param.source for param in planned.group.params.values())
            logical = nbytes(planned.specs(loaded.config.dtype))
            sizes[sources] = min(logical, _held_bytes(held, logical))
    return Traffic(sum(sizes.values()), _cache_bytes(loaded))


def _pairs(groups: Any, weights: Any) -> Iterator[tuple[WeightPlan, Any]]:
    if isinstance(groups, WeightPlan):
        yield groups, weights
    elif isinstance(groups, Mapping):
        for name, group in groups.items():
            yield from _pairs(group, weights[name])
    elif isinstance(groups, tuple):
        for group, held in zip(groups, weights, strict=True):
            yield from _pairs(group, held)


def _held_bytes(held: Any, otherwise: int) -> int:
    """Bytes of a group's tensors on any framework; unknown dtypes are not guessed."""
    total = 0
    for leaf in leaves(held):
        name = str(leaf.dtype).rpartition(".")[2]
        if name not in SIZES:
            return otherwise
        total += SIZES[name] * math.prod(leaf.shape)
    return total


def _cache_bytes(loaded: Loaded) -> int:
    return sum(
        len(item.layers) * item.token_bytes
        for item in loaded.model.state(loaded.config)
        if isinstance(item, Paged)
    )
