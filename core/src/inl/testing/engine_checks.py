"""Checks of the engine on a device: answers do not depend on scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.inference_engine import InferenceEngine
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.testing.adapter_checks import answers_with_adapters
from inl.testing.check import Check, Measure, equal, require, worst
from inl.testing.invariant_checks import INVARIANT, same_bits, serves_invariant
from inl.testing.near_tie import BOUNDS, compare
from inl.testing.oracle import VOCAB, Tiny, tinies
from inl.testing.play import most_rows
from inl.testing.runner_frames import opened

if TYPE_CHECKING:
    from inl.protocol.runner import Limits
    from inl.testing.target import Target
    from inl.text.tokenizer import Tokenizer

COUNT = 10
"""Tokens per answer."""


def engine_checks(target: Target) -> Iterator[Check]:
    """Check batching, preemption, prefix cache, cancellation, seeds and streaming."""
    checks: dict[str, Callable[[Tiny], Measure | None]] = {
        "batched": _batched,
        "preemption": _preemption,
        "prefix": _prefix,
        "cold-warm": _cold_and_warm,
        "uncached": _uncached,
        "cancel": _cancel,
        "seeds": _seeds,
        "stream": _stream,
        "adapters": answers_with_adapters,
    }
    for tiny in tinies(target):
        for name, run in checks.items():
            yield Check("engine", f"engine/{name}/{tiny.dtype}", partial(run, tiny))
        if serves_invariant(tiny):
            name = f"{INVARIANT}/{tiny.dtype}"
            yield Check("engine", name, partial(same_bits, tiny))


class Session:
    """Context manager of an engine core; requires all blocks to be free at its end."""

    def __init__(
        self, tiny: Tiny, config: SchedulerConfig | None = None, **limits: Any
    ) -> None:
        self._tiny = tiny
        self.core = EngineCore(tiny.runner(**limits), config)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._drain()
        finally:
            self.core.runner.close()

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve requests concurrently and return their tokens."""
        numbers = [self.core.add(request) for request in requests]
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        running = set(numbers)
        while running:
            for event in self.core.step():
                if event.token is not None:
                    answers[event.request].append(event.token)
                if event.finish_reason is not None:
                    running.discard(event.request)
                equal(f"error of request {event.request}", event.error, None)
        return [answers[number] for number in numbers]

    def _drain(self) -> None:
        """Finish pending steps; then no block may be in use."""
        for _ in range(64):
            if not self.core.has_work:
                break
            self.core.step()
        require(
            not self.core.has_work,
            "engine: steps are pending after all requests have finished",
        )
        for group, pool in enumerate(self.core.scheduler.kv_cache.pools):
            require(
                pool.used_blocks == 0,
                f"block leak: {pool.used_blocks} blocks of cache group {group} in use "
                f"after all requests have finished; seed {self._tiny.target.seed}",
            )


def _prompts(tiny: Tiny, lengths: Sequence[int], *names: object) -> list[list[int]]:
    rng = tiny.target.rng("prompts", *names)
    return [[int(x) for x in rng.integers(0, VOCAB, length)] for length in lengths]


def _judge(
    tiny: Tiny, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Measure:
    """Compare greedy answers with the oracle."""
    for prompt, answer in zip(prompts, answers, strict=True):
        equal(f"answer length for a prompt of {len(prompt)}", len(answer), COUNT)
    pairs = zip(prompts, answers, strict=True)
    return worst([tiny.judge(prompt, answer) for prompt, answer in pairs])


def _greedy(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(prompt, max_tokens=COUNT) for prompt in prompts]


def _batched(tiny: Tiny) -> Measure:
    """Answers equal the oracle's alone, in a batch, and with chunked prefill."""
    prompts = _prompts(tiny, (1, 2, 9, 17, 33, 40, 5))
    with Session(tiny) as session:
        together = session.answer(_greedy(prompts))
    with Session(tiny, SchedulerConfig(token_budget=13)) as session:
        chunked = session.answer(_greedy(prompts))
    with Session(tiny) as session:
        alone = [session.answer(_greedy([prompt]))[0] for prompt in prompts]
    return worst([_judge(tiny, prompts, each) for each in (together, chunked, alone)])


def _preemption(tiny: Tiny) -> Measure:
    """With too few blocks, preempted requests restart and answer the same."""
    limits: Limits = tiny.limits()
    size = limits.block_size
    # Each prompt fits one block and outgrows it; two more blocks are free.
    rows = most_rows(_served_limits(tiny), 3)
    lengths = (size - 3, size - 4, size - 5) if size > 5 else (3, 3, 3)
    prompts = _prompts(tiny, lengths[:rows])
    prompts = [prompt or [1] for prompt in prompts]
    need = -(-(max(map(len, prompts)) + COUNT) // size)
    blocks = max(need, len(prompts) * -(-max(map(len, prompts)) // size)) + 3
    config = SchedulerConfig(prefix_cache=False)
    with Session(tiny, config, blocks=(blocks,)) as session:
        answers = session.answer(_greedy(prompts))
    if size > 5 and need > 1 and rows > 1:
        _require_preempted(tiny, prompts, need)
    return _judge(tiny, prompts, answers)


def _served_limits(tiny: Tiny) -> Limits:
    """Return the limits of a runner, which has the buckets of the backend."""
    with opened(tiny) as runner:
        return runner.limits


def _require_preempted(tiny: Tiny, prompts: list[list[int]], need: int) -> None:
    config = SchedulerConfig(prefix_cache=False)
    # One of the sequences finds no block for its last tokens.
    with Session(tiny, config, blocks=(need * (len(prompts) - 1) + 2,)) as session:
        answers = session.answer(_greedy(prompts))
        preemptions = session.core.stats.preemptions
        require(preemptions > 0, "engine: found no preemption, expected at least one")
    _judge(tiny, prompts, answers)


def _prefix(tiny: Tiny) -> Measure:
    """A shared prefix is computed once and does not change the answers."""
    size = tiny.limits().block_size
    (shared,) = _prompts(tiny, (min(2 * size, 40),))
    prompts = [shared + tail for tail in _prompts(tiny, (3, 7, 1, 9), "tails")]
    prompts = [prompt[: 64 - COUNT] for prompt in prompts]
    measures = []
    for enabled in (True, False):
        with Session(tiny, SchedulerConfig(prefix_cache=enabled)) as session:
            answers = [session.answer(_greedy([prompt]))[0] for prompt in prompts]
            hits = session.core.stats.prefix_hit_tokens
        expected = enabled and size <= 40
        equal(f"prefix hits with prefix_cache={enabled}", hits > 0, expected)
        measures.append(_judge(tiny, prompts, answers))
    return worst(measures)


def _cold_and_warm(tiny: Tiny) -> None:
    """A prompt whose prefix is cached gives the tokens of a cold one."""
    size = tiny.limits().block_size
    limits: dict[str, Any] = {}
    if 2 * size + 2 + COUNT > 64:
        limits = {"max_blocks_per_seq": 3, "blocks": (20,)}
    prompts = _prompts(tiny, (size + 1, 2 * size, 2 * size + 2), "cold-warm")
    prompts.append(prompts[2][:size] + prompts[0][1:3])  # shares one block with another
    with Session(tiny, SchedulerConfig(prefix_cache=False), **limits) as session:
        cold = [session.answer(_greedy([prompt]))[0] for prompt in prompts]
    with Session(tiny, **limits) as session:
        session.answer(_greedy(prompts[:3]))
        for prompt, answer in zip(prompts, cold, strict=True):
            before = session.core.stats.prefix_hit_tokens
            (warm,) = session.answer(_greedy([prompt]))
            hits = session.core.stats.prefix_hit_tokens - before
            expected = (len(prompt) - 1) // size * size
            equal(f"cached tokens of a prompt of {len(prompt)}", hits, expected)
            _require_same(tiny, prompt, hits, answer, warm)


def _require_same(
    tiny: Tiny, prompt: Sequence[int], hits: int, cold: list[int], warm: list[int]
) -> None:
    """Compare two answers under the rule of :mod:`inl.testing.near_tie`."""
    logits = np.sort(tiny.logits([*prompt, *cold])[len(prompt) - 1 : -1], -1)
    margins = (logits[:, -1] - logits[:, -2]).tolist()
    found = compare(warm, cold, margins)
    require(
        found.allowed(tiny.dtype),
        f"{tiny.target.device} in {tiny.dtype}: a prompt of {len(prompt)} tokens "
        f"answers {cold} if it is computed, and {warm} with its first {hits} tokens "
        f"from the prefix cache; logit gap at the first difference {found.gap}, "
        f"accepted: below {BOUNDS[tiny.dtype]:g}. An admission of length {hits} must "
        "set the block table and the length of the slot, from which positions and "
        f"cache cells of the next tokens follow; seed {tiny.target.seed}",
    )


def _uncached(tiny: Tiny) -> Measure:
    """Answers without a KV cache, recomputed from the start, are the same."""
    prompts = _prompts(tiny, (2, 15, 30))
    with Session(tiny, SchedulerConfig(use_kv_cache=False)) as session:
        return _judge(tiny, prompts, session.answer(_greedy(prompts)))


def _cancel(tiny: Tiny) -> Measure:
    """Cancelled requests free their blocks and do not affect other requests."""
    prompts = _prompts(tiny, (20, 30, 9, 3, 25))
    with Session(tiny) as session:
        core = session.core
        cancelled = [core.add(Request(p, max_tokens=30)) for p in prompts[:3]]
        for number in cancelled:
            core.step()
            require(
                core.cancel(number),
                f"request {number}: finished before it was cancelled",
            )
        return _judge(tiny, prompts[3:], session.answer(_greedy(prompts[3:])))


def _seeds(tiny: Tiny) -> None:
    """The same seed gives the same tokens, another seed gives different ones."""

    def sample(first: int) -> list[list[int]]:
        requests = [
            Request(prompt, max_tokens=COUNT, temperature=1.0, seed=first + index)
            for index, prompt in enumerate(_prompts(tiny, (4, 4, 11)))
        ]
        with Session(tiny) as session:
            return session.answer(requests)

    tokens = sample(1)
    equal("tokens sampled again with the same seeds", sample(1), tokens)
    require(
        sample(1000) != tokens,
        f"different seeds gave the same {3 * COUNT} tokens at temperature 1; the "
        "sampler must use the uniform numbers of the frame",
    )


def _stream(tiny: Tiny) -> Measure:
    """``InferenceEngine.stream`` and ``generate`` give the same text."""
    config = EngineConfig(
        backend=tiny.target.device, dtype=tiny.dtype, max_batch=4, context=64
    )
    prompts = _prompts(tiny, (5, 12))
    with InferenceEngine(tiny.language, byte_tokenizer(), config) as engine:
        batch = engine.generate(prompts, max_tokens=COUNT)
        for prompt, answer in zip(prompts, batch, strict=True):
            pieces = engine.stream(prompt, max_tokens=COUNT)
            text, alone = "".join(pieces), engine.generate(prompt, max_tokens=COUNT)
            equal("streamed text, compared with generate", text, alone.text)
            equal("finish reason", answer.finish_reason, "length")
    answers = [list(answer.token_ids) for answer in batch]
    return _judge(tiny, prompts, answers)


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer without merges: each byte is one token."""
    from inl.text.tokenizer import Tokenizer, library

    package = library()
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: index for index, letter in enumerate(alphabet)}
    rules = package.Tokenizer(package.models.BPE(ids, []))
    rules.pre_tokenizer = package.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    rules.decoder = package.decoders.ByteLevel()
    return Tokenizer(rules)
