"""Promises of the engine on this device: scheduling is never seen in an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.inference_engine import InferenceEngine
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.testing.check import Check, Measure, equal, require, worst
from inl.testing.oracle import VOCAB, Tiny, tinies

if TYPE_CHECKING:
    from inl.protocol.runner import Limits
    from inl.testing.target import Target
    from inl.text.tokenizer import Tokenizer

COUNT = 10
"""Tokens that each answer has."""


def engine_checks(target: Target) -> Iterator[Check]:
    """Batches, preemption, shared prefixes, no cache, cancellation, seeds, streams."""
    found: dict[str, Callable[[Tiny], Measure | None]] = {
        "batched": _batched,
        "preemption": _preemption,
        "prefix": _prefix,
        "uncached": _uncached,
        "cancel": _cancel,
        "seeds": _seeds,
        "stream": _stream,
    }
    for tiny in tinies(target):
        for name, run in found.items():
            yield Check("engine", f"engine/{name}/{tiny.dtype}", partial(run, tiny))


class Session:
    """An engine core on a fresh runner; at its end every block must be free."""

    def __init__(
        self, tiny: Tiny, policy: SchedulerConfig | None = None, **limits: Any
    ) -> None:
        self._tiny = tiny
        self.core = EngineCore(tiny.runner(**limits), policy)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._settle()
        finally:
            self.core.runner.close()

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve requests together: the tokens that each got."""
        numbers = [self.core.add(request) for request in requests]
        texts: dict[int, list[int]] = {number: [] for number in numbers}
        open_ones = set(numbers)
        while open_ones:
            for event in self.core.step():
                if event.token is not None:
                    texts[event.request].append(event.token)
                if event.finish_reason is not None:
                    open_ones.discard(event.request)
                equal(f"error of request {event.request}", event.error, None)
        return [texts[number] for number in numbers]

    def _settle(self) -> None:
        """Collect what is late; then nobody may hold a block or a slot."""
        for _ in range(64):
            if not self.core.has_work:
                break
            self.core.step()
        require(not self.core.has_work, "engine: steps are left after every answer")
        for group, pool in enumerate(self.core.scheduler.kv_cache.pools):
            require(
                pool.used_blocks == 0,
                f"blocks leak: {pool.used_blocks} of cache group {group} are held "
                f"after every request has ended; seed {self._tiny.target.seed}",
            )


def _prompts(tiny: Tiny, lengths: Sequence[int], *names: object) -> list[list[int]]:
    rng = tiny.target.rng("prompts", *names)
    return [[int(x) for x in rng.integers(0, VOCAB, length)] for length in lengths]


def _judge(
    tiny: Tiny, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> Measure:
    for prompt, answer in zip(prompts, found, strict=True):
        equal(f"tokens after a prompt of {len(prompt)}", len(answer), COUNT)
    pairs = zip(prompts, found, strict=True)
    return worst([tiny.judge(prompt, answer) for prompt, answer in pairs])


def _greedy(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(prompt, max_tokens=COUNT) for prompt in prompts]


def _batched(tiny: Tiny) -> Measure:
    """Alone or beside strangers, each answer is the oracle's."""
    prompts = _prompts(tiny, (1, 2, 9, 17, 33, 40, 5))
    with Session(tiny) as session:
        together = session.answer(_greedy(prompts))
    with Session(tiny, SchedulerConfig(token_budget=13)) as session:
        chunked = session.answer(_greedy(prompts))
    with Session(tiny) as session:
        alone = [session.answer(_greedy([prompt]))[0] for prompt in prompts]
    return worst([_judge(tiny, prompts, each) for each in (together, chunked, alone)])


def _preemption(tiny: Tiny) -> Measure:
    """Too few blocks for all: who loses them starts over and answers the same."""
    limits: Limits = tiny.limits()
    size = limits.block_size
    # Each begins with a block of its own and outgrows it; there are two to share.
    prompts = _prompts(tiny, (size - 3, size - 4, size - 5) if size > 5 else (3, 3, 3))
    prompts = [prompt or [1] for prompt in prompts]
    need = -(-(max(map(len, prompts)) + COUNT) // size)
    blocks = max(need, len(prompts) * -(-max(map(len, prompts)) // size)) + 3
    policy = SchedulerConfig(prefix_cache=False)
    with Session(tiny, policy, blocks=(blocks,)) as session:
        found = session.answer(_greedy(prompts))
    if size > 5 and need > 1:
        _require_preempted(tiny, prompts, need)
    return _judge(tiny, prompts, found)


def _require_preempted(tiny: Tiny, prompts: list[list[int]], need: int) -> None:
    long = [Request(prompt, max_tokens=COUNT) for prompt in prompts]
    policy = SchedulerConfig(prefix_cache=False)
    with Session(tiny, policy, blocks=(need * 2 + 2,)) as session:
        found = session.answer(long)
        require(session.core.stats.preemptions > 0, "engine: nobody was preempted")
    _judge(tiny, prompts, found)


def _prefix(tiny: Tiny) -> Measure:
    """A shared beginning is computed once, and changes nothing."""
    size = tiny.limits().block_size
    (shared,) = _prompts(tiny, (min(2 * size, 40),))
    prompts = [shared + tail for tail in _prompts(tiny, (3, 7, 1, 9), "tails")]
    prompts = [prompt[: 64 - COUNT] for prompt in prompts]
    measures = []
    for kept in (True, False):
        with Session(tiny, SchedulerConfig(prefix_cache=kept)) as session:
            found = [session.answer(_greedy([prompt]))[0] for prompt in prompts]
            hits = session.core.stats.prefix_hit_tokens
        equal(f"prefix hits with prefix_cache={kept}", hits > 0, kept and size <= 40)
        measures.append(_judge(tiny, prompts, found))
    return worst(measures)


def _uncached(tiny: Tiny) -> Measure:
    """Without a cache every token is computed from the beginning: the same answer."""
    prompts = _prompts(tiny, (2, 15, 30))
    with Session(tiny, SchedulerConfig(use_kv_cache=False)) as session:
        return _judge(tiny, prompts, session.answer(_greedy(prompts)))


def _cancel(tiny: Tiny) -> Measure:
    """Cancelled requests give their blocks back; the others do not notice."""
    prompts = _prompts(tiny, (20, 30, 9, 3, 25))
    with Session(tiny) as session:
        core = session.core
        doomed = [core.add(Request(p, max_tokens=30)) for p in prompts[:3]]
        for number in doomed:
            core.step()
            require(core.cancel(number), f"request {number}: ended too early")
        return _judge(tiny, prompts[3:], session.answer(_greedy(prompts[3:])))


def _seeds(tiny: Tiny) -> None:
    """The same seed gives the same tokens, and another seed gives others."""

    def draw(first: int) -> list[list[int]]:
        requests = [
            Request(prompt, max_tokens=COUNT, temperature=1.0, seed=first + place)
            for place, prompt in enumerate(_prompts(tiny, (4, 4, 11)))
        ]
        with Session(tiny) as session:
            return session.answer(requests)

    found = draw(1)
    equal("tokens drawn with the same seeds again", draw(1), found)
    require(
        draw(1000) != found,
        f"other seeds drew the same {3 * COUNT} tokens at temperature 1; the sampler "
        "must follow the uniform numbers that the host sends",
    )


def _stream(tiny: Tiny) -> Measure:
    """``InferenceEngine``: what is streamed is what is generated, also in a batch."""
    config = EngineConfig(
        backend=tiny.target.device, dtype=tiny.dtype, max_batch=4, context=64
    )
    prompts = _prompts(tiny, (5, 12))
    with InferenceEngine(tiny.language, byte_tokenizer(), config) as engine:
        whole = engine.generate(prompts, max_tokens=COUNT)
        for prompt, answer in zip(prompts, whole, strict=True):
            pieces = engine.stream(prompt, max_tokens=COUNT)
            text, alone = "".join(pieces), engine.generate(prompt, max_tokens=COUNT)
            equal("text streamed and generated", text, alone.text)
            equal("finish reason", answer.finish_reason, "length")
    found = [list(answer.token_ids) for answer in whole]
    return _judge(tiny, prompts, found)


def byte_tokenizer() -> Tokenizer:
    """Bytes are tokens, spelled as byte-level BPE spells them, with no merges."""
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
