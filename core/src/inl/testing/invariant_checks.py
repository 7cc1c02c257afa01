"""Check of the invariant mode: log-probabilities have the same bits in every way.

A request's tokens and the bits of their log-probabilities, which are a function of all
logits, are compared between a run of its own and runs with random batches, chunks,
prefix hits, preemptions and speculation; and the logits themselves between random
compositions of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import widen
from inl.engine.core import EngineCore
from inl.errors import NoKernel
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import TOP, Bucket
from inl.speculation.drafters import SyntheticDrafter
from inl.speculation.planner import Speculation
from inl.testing.check import CheckFailed, equal, require
from inl.testing.oracle import VOCAB, Tiny

if TYPE_CHECKING:
    from inl.runners.local_runner import LocalRunner
    from inl.testing.target import Target

INVARIANT = "engine/invariant"
"""Beginning of the names of these checks; a dtype follows."""

COUNT = 8
"""Tokens per answer."""

DRAFTS, ACCEPTANCE = 3, 0.6

SAMPLING: Sequence[Mapping[str, Any]] = (
    {}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.1, "seed": 6, "top_k": 9},
)  # fmt: skip

Bits = list[tuple[Any, ...]]
"""For each token its id, log-probability, and those of the most likely ones."""


def missing_kernels(target: Target) -> list[str]:
    """Return the primitive ops without a batch-invariant kernel, sorted by name.

    An engine with ``EngineConfig(invariant=True)`` refuses models that need them.
    """
    marked = {kernel.op for kernel in target.selection.kernels if kernel.invariant}
    return sorted(
        spec.name
        for spec in target.ops.values()
        if not spec.composite and spec.name not in marked
    )


def serves_invariant(tiny: Tiny) -> bool:
    """Whether the backend has batch-invariant kernels for a Llama and its drafts."""
    missing = missing_kernels(tiny.target)
    try:
        tiny.runner(invariant=True).close()
    except NoKernel:
        return False
    return not {"expand_rows", "verify", "score"}.intersection(missing)


def same_bits(tiny: Tiny) -> None:
    """Compare each request alone with the same request in every other way."""
    rng = tiny.target.rng("invariant")
    size = tiny.limits().block_size
    # The first three fit one block and outgrow it.
    lengths = [max(min(size, 48) - n, 3) for n in (3, 4, 5)] + [1, 7, 33, 40]
    prompts = [[int(x) for x in rng.integers(0, VOCAB, n)] for n in lengths]
    prompts.append(prompts[-1][: min(size, 40)] + [1, 2, 3])  # shares a block
    alone = _serve(tiny, prompts, at_once=1)
    for name, run in _ways(tiny, prompts, alone, rng):
        for prompt, want, found in zip(prompts, alone, run, strict=False):
            _require_equal(tiny, f"{name}, prompt of {len(prompt)}", want, found)
    _same_logits(tiny, prompts[-2], rng)


def _ways(
    tiny: Tiny, prompts: list[list[int]], alone: list[Bits], rng: np.random.Generator
) -> Iterator[tuple[str, list[Bits]]]:
    """Yield each way to serve the prompts, or the first of them, and what it gives."""
    for _ in range(3 if tiny.target.full else 1):
        together = int(rng.integers(2, 7))
        yield f"{together} requests at once", _serve(tiny, prompts, at_once=together)
        budget = int(rng.integers(6, 30))
        config = SchedulerConfig(token_budget=budget, prefix_cache=False)
        yield (
            f"at most {budget} tokens per step",
            _serve(tiny, prompts, config=config),
        )
    yield "prefix hits", _warm(tiny, prompts)
    yield "preemptions", _preempted(tiny, prompts[:3])
    texts = {
        tuple(prompt): [token for token, *_ in bits]
        for prompt, bits in zip(prompts, alone, strict=True)
    }
    yield "speculation", _serve(tiny, prompts, texts=texts)


def _serve(
    tiny: Tiny,
    prompts: Sequence[Sequence[int]],
    *,
    at_once: int = 6,
    config: SchedulerConfig | None = None,
    texts: Mapping[tuple[int, ...], Sequence[int]] | None = None,
) -> list[Bits]:
    runner = tiny.runner(invariant=True, max_drafts=DRAFTS if texts else 0)
    config = config or SchedulerConfig(prefix_cache=False)
    speculation = None
    if texts:
        speculation = Speculation(SyntheticDrafter(texts, ACCEPTANCE), DRAFTS)
    scheduler = Scheduler(runner.limits, config, speculation=speculation)
    core = EngineCore(runner, scheduler=scheduler)
    try:
        found = _run(core, prompts, at_once)
    finally:
        runner.close()
    if speculation is not None:
        require(
            speculation.drafted > speculation.accepted > 0,
            f"engine: {speculation.accepted} of {speculation.drafted} drafts were "
            "accepted, expected some and not all",
        )
    return found


def _warm(tiny: Tiny, prompts: Sequence[Sequence[int]]) -> list[Bits]:
    """Serve all prompts twice, the second time from the prefix cache."""
    runner = tiny.runner(invariant=True)
    core = EngineCore(runner, SchedulerConfig(prefix_cache=True))
    try:
        _run(core, prompts, 1)
        before = core.stats.prefix_hit_tokens
        found = _run(core, prompts, 6)
        hits = core.stats.prefix_hit_tokens - before
    finally:
        runner.close()
    if max(map(len, prompts)) > runner.limits.block_size:
        require(hits > 0, "engine: found no prefix hit, expected at least one")
    return found


def _preempted(tiny: Tiny, prompts: Sequence[Sequence[int]]) -> list[Bits]:
    """Serve prompts that outgrow their blocks at once, with blocks for two."""
    size = tiny.limits().block_size
    need = -(-(max(map(len, prompts)) + COUNT) // size)
    runner = tiny.runner(invariant=True, blocks=(need * 2 + 2,))
    core = EngineCore(runner, SchedulerConfig(prefix_cache=False))
    try:
        found = _run(core, prompts, len(prompts))
        preemptions = core.stats.preemptions
    finally:
        runner.close()
    if size > 5 and need > 1:
        require(preemptions > 0, "engine: found no preemption, expected at least one")
    return found


def _run(
    core: EngineCore, prompts: Sequence[Sequence[int]], at_once: int
) -> list[Bits]:
    """Serve the prompts, ``at_once`` of them at a time, and return their bits."""
    requests = [
        Request(
            list(prompt), max_tokens=COUNT, ignore_eos=True, logprobs=TOP,
            **SAMPLING[at % len(SAMPLING)],
        )
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip
    waiting = list(reversed(requests))
    live: list[Request] = []
    while waiting or core.has_work:
        live = [each for each in live if each.finish_reason is None]
        while waiting and len(live) < at_once:
            live.append(waiting.pop())
            core.add(live[-1])
        core.step()
    for request in requests:
        equal(f"error of request {request.id}", request.error, None)
    return [
        [(each.token, each.logprob, each.top) for each in request.token_logprobs]
        for request in requests
    ]


def _require_equal(tiny: Tiny, name: str, want: Bits, found: Bits) -> None:
    if want == found:
        return
    pairs = list(zip(want, found, strict=False))
    at = next((n for n, (one, two) in enumerate(pairs) if one != two), len(pairs))
    raise CheckFailed(
        f"{tiny.target.device} in {tiny.dtype}, invariant, {name}: found "
        f"{found[at][:2] if at < len(found) else 'nothing'} (token, log-probability) "
        f"at place {at} of the answer, expected the bits of the request alone, "
        f"{want[at][:2] if at < len(want) else 'nothing'}; seed {tiny.target.seed}. A "
        "kernel with invariant=True must not add in an order that depends on the "
        "step's other tokens"
    )


def _same_logits(tiny: Tiny, ids: list[int], rng: np.random.Generator) -> None:
    """Compare the logits of a prompt between random chunks and companions."""
    runner = tiny.runner(invariant=True)
    try:
        want = _logits(runner, ids, [len(ids)], 0)
        for _ in range(4):
            cuts = rng.choice(len(ids) - 1, int(rng.integers(1, 4)), replace=False) + 1
            chunks = np.diff([0, *sorted(cuts), len(ids)]).tolist()
            others = int(rng.integers(0, 20))
            found = _logits(runner, ids, chunks, others)
            require(
                np.array_equal(found, want),
                f"{tiny.target.device} in {tiny.dtype}, invariant: a prompt of "
                f"{len(ids)} tokens in chunks of {chunks}, the last beside another of "
                f"{others}, has other bits than in one step, in "
                f"{int((found != want).sum())} of {want.size} logits; seed "
                f"{tiny.target.seed}",
            )
    finally:
        runner.close()


def _logits(runner: LocalRunner, ids: list[int], chunks: list[int], others: int) -> Any:
    """Return the logits [V] after a prompt, the last chunk beside ``others`` tokens."""
    limits, start, found = runner.limits, 0, None
    common: dict[str, Any] = {"groups": 1, "block_size": limits.block_size}
    for slot in (1, 2):
        first = 1 + (slot - 1) * limits.max_blocks_per_seq
        table = list(range(first, first + limits.max_blocks_per_seq))
        runner.submit(
            admit_frame(
                slot, [table], groups=1, max_blocks_per_seq=limits.max_blocks_per_seq
            )
        )
    for number, count in enumerate(chunks):
        rows = [Row(1, ids[start : start + count])]
        if others and number == len(chunks) - 1:
            rows.append(Row(2, [7] * others))
        bucket = _bucket(runner, sum(len(row.tokens) for row in rows), len(rows))
        frame = step_frame(bucket, rows, step=number + 1, decode_rows=0, **common)
        found = widen(runner.logits(frame))[0]
        start += count
    return found


def _bucket(runner: LocalRunner, tokens: int, rows: int) -> Bucket:
    """Return the step's program, or its exact size without programs."""
    fits = (
        bucket
        for bucket in sorted(runner.limits.buckets)
        if bucket.tokens >= tokens and bucket.rows >= rows and bucket.reply_width == 1
    )
    return next(fits, Bucket(tokens=tokens, rows=rows))
