"""Contract checks of a runner: the tokens that it samples for given frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from inl.spec.message import POOLED, SCORED, BlockTableUpdate, release_frame
from inl.spec.scored_tokens import as_uniform
from inl.testing.check import Check, CheckFailed, Measure, equal, require, worst
from inl.testing.consumption_checks import consumed
from inl.testing.kv_dtype_checks import kv_dtype_checks
from inl.testing.near_tie import BOUNDS
from inl.testing.oracle import Tiny, prompt_logits, tinies
from inl.testing.play import admission, answer_alone, most_rows, most_tokens, one_step
from inl.testing.prepared_checks import meshes, precompiled, programs
from inl.testing.runner_frames import (
    bad_frames,
    close,
    feedback,
    first_blocks,
    masks,
    opened,
    some_ids,
)
from inl.testing.sharing_checks import in_thread, memory, two_runners
from inl.testing.step_checks import closed, longer_contexts, out_of_memory, repeated
from inl.testing.traffic import Traffic, play

if TYPE_CHECKING:
    from inl.testing.target import Target

COUNT = 8
"""Tokens of each answer."""


def runner_checks(target: Target) -> Iterator[Check]:
    """Yield checks of a tiny Llama on the backend's runner, against float64."""
    checks: dict[str, Callable[[Tiny], Measure | None]] = {
        "logits": _logits,
        "pooled": _pooled,
        "scored": _scored,
        "traffic": _traffic,
        "chunks": _chunks,
        "placement": _placement,
        "padding": _padding,
        "feedback": feedback,
        "uniforms": _uniforms,
        "masks": masks,
        "bad_frames": bad_frames,
        "close": close,
        "consumed": consumed,
        "two runners": two_runners,
        "thread": in_thread,
        "memory": memory,
        "repeated": repeated,
        "out of memory": out_of_memory,
        "context lengths": longer_contexts,
        "closed": closed,
        "programs": programs,
        "precompiled": precompiled,
        "mesh": meshes,
    }
    for tiny in tinies(target):
        for name, run in checks.items():
            yield Check("runner", f"runner/{name}/{tiny.dtype}", partial(run, tiny))
        yield from kv_dtype_checks(tiny)


def _logits(tiny: Tiny) -> Measure:
    """The logits' error is at most four times that of NumPy with the same storage."""
    with opened(tiny) as runner:
        ids = some_ids(tiny, most_tokens(runner.limits, 37))
        logits = prompt_logits(runner, ids)
    expected = tiny.logits(ids)[-1]
    error = float(np.abs(logits - expected).max())
    bound = 4 * tiny.expected_error(ids) + 1e-6 * float(np.abs(expected).max())
    require(
        error <= bound,
        f"logits of a tiny Llama in {tiny.dtype}: error {error:.3g} > {bound:.3g}, "
        f"four times the rounding error; seed {tiny.target.seed}",
        Measure(error, bound),
    )
    return Measure(error, bound)


def _pooled(tiny: Tiny) -> Measure:
    """Hidden states of two rows, one of which has two chunks, as the head reads them.

    Their logits in float64 have at most the error that is accepted of logits.
    """
    with opened(tiny) as runner:
        limits, blocks = runner.limits, first_blocks(runner, 20)
        half = most_tokens(limits, 38) // 2
        rows = most_rows(limits, 2, 2 * half)
        prompts = [some_ids(tiny, half, row) for row in range(rows)]
        for row in range(rows):
            own = [block + row * len(blocks) for block in blocks]
            runner.submit(admission(limits, row + 1, own))
        first, later = prompts[0][: half // 2], prompts[0][half // 2 :]
        second = [(1, later), *((2, prompt) for prompt in prompts[1:])]
        for step, parts in enumerate(([(1, first)], second)):
            frame = one_step(limits, parts, step=step + 1, decoding=0, flags=POOLED)
            runner.submit(frame)
            reply = runner.collect()
    require(reply.hidden is not None, "the reply of a pooled step has no hidden states")
    head = np.asarray(tiny.tensors["lm_head.weight"], np.float64)
    found = np.asarray(reply.hidden, np.float64)[:rows] @ head.T
    expected = np.stack([tiny.logits(ids)[-1] for ids in prompts])
    error = float(np.abs(found - expected).max())
    bound = 4 * max(map(tiny.expected_error, prompts))
    bound += 1e-6 * float(np.abs(expected).max())
    require(
        error <= bound,
        f"hidden states of a tiny Llama in {tiny.dtype}: error {error:.3g} > "
        f"{bound:.3g} of their logits; seed {tiny.target.seed}",
        Measure(error, bound),
    )
    return Measure(error, bound)


def _scored(tiny: Tiny) -> Measure:
    """Log-probabilities of the tokens of two prompts, one of which has two chunks.

    They have at most twice the error that is accepted of logits: each is a difference.
    """
    with opened(tiny) as runner:
        limits, blocks = runner.limits, first_blocks(runner, 20)
        half = most_tokens(limits, 38) // 2
        rows = most_rows(limits, 2, 2 * half)
        prompts = [some_ids(tiny, half, row) for row in range(rows)]
        for row in range(rows):
            own = [block + row * len(blocks) for block in blocks]
            runner.submit(admission(limits, row + 1, own))
        found: list[list[float]] = [[] for _ in prompts]
        cut = half // 2
        steps = [[(0, 0, cut)], [(0, cut, half - 1), (1, 0, half - 1)][:rows]]
        for step, chunks in enumerate(steps, start=1):
            parts = [
                (row + 1, prompts[row][start:stop], as_uniform(prompts[row][stop]))
                for row, start, stop in chunks
            ]
            frame = one_step(
                limits, parts, step=step, decoding=0, flags=SCORED,
                sampler="sample_filtered",
            )  # fmt: skip
            runner.submit(frame)
            scores = runner.collect().scores
            if scores is None:
                raise CheckFailed("the reply of a scored step has no scores")
            values = iter(np.asarray(scores.chosen, np.float64).tolist())
            for row, start, stop in chunks:
                found[row] += [next(values) for _ in range(start, stop)]
    error = bound = 0.0
    for ids, values in zip(prompts, found, strict=True):
        logits = np.asarray(tiny.logits(ids), np.float64)[:-1]
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = logs[np.arange(len(ids) - 1), list(ids)[1:]]
        error = max(error, float(np.abs(expected - values).max()))
        largest = float(np.abs(logits).max())
        bound = max(bound, 8 * tiny.expected_error(ids) + 2e-6 * largest)
    require(
        error <= bound,
        f"log-probabilities of a tiny Llama's prompts in {tiny.dtype}: error "
        f"{error:.3g} > {bound:.3g}; seed {tiny.target.seed}",
        Measure(error, bound),
    )
    return Measure(error, bound)


def _traffic(tiny: Tiny) -> Measure:
    """Admissions and releases, mixed chunks, scattered blocks, steps in flight."""
    steps = 300 if tiny.target.full else 60
    with opened(tiny) as runner:
        traffic = Traffic(tiny.target.rng("traffic"), runner.limits)
        texts = play(runner, traffic.frames(steps))
    equal("sequences without an answer", [t for t in texts.values() if not t], [])
    return worst([tiny.judge(traffic.prompts[n], text) for n, text in texts.items()])


def _chunks(tiny: Tiny) -> Measure:
    """A prompt in one chunk, token by token, and in uneven chunks: same answer."""
    measures = []
    for chunks in ((21,), (1,) * 21, (16, 5), (7, 7, 7), (20, 1)):
        with opened(tiny) as runner:
            if max(chunks) > most_tokens(runner.limits, 21):
                continue
            prompt = some_ids(tiny, 21)
            blocks = first_blocks(runner, 64)
            answer = answer_alone(runner, prompt, COUNT, chunks=chunks, blocks=blocks)
        measures.append(tiny.judge(prompt, answer))
    return worst(measures)


def _placement(tiny: Tiny) -> Measure:
    """Blocks in random order, and block table entries set by later steps."""
    measures = []
    for trial in range(3):
        with opened(tiny) as runner:
            rng = tiny.target.rng("blocks", trial)
            last = runner.limits.blocks[0] - 1
            blocks = [
                int(b) + 1
                for b in rng.permutation(last)[: runner.limits.max_blocks_per_seq]
            ]
            blocks[0] = last if last not in blocks else blocks[0]
            prompt = some_ids(tiny, most_tokens(runner.limits, 19), trial)
            chunks = (len(prompt),)
            answer = answer_alone(runner, prompt, COUNT, chunks=chunks, blocks=blocks)
        measures.append(tiny.judge(prompt, answer))
    return worst([*measures, _late_updates(tiny)])


def _late_updates(tiny: Tiny) -> Measure:
    with opened(tiny) as runner:
        limits, size = runner.limits, runner.limits.block_size
        prompt = some_ids(tiny, 5)
        runner.submit(admission(limits, 1, []))
        count, answer, last = 0, [], limits.blocks[0] - 1
        for step in range(1, min(2 * size, 60) - len(prompt)):
            tokens = prompt if step == 1 else [-1]
            length = len(prompt) + step - 1
            updates = []
            while count * size < length:
                updates.append(BlockTableUpdate(0, 1, count, last - count))
                count += 1
            frame = one_step(
                limits, [(1, tokens)], step=step, decoding=int(step > 1),
                updates=updates,
            )  # fmt: skip
            runner.submit(frame)
            answer.append(int(runner.collect().tokens[0, 0]))
    return tiny.judge(prompt, answer)


def _padding(tiny: Tiny) -> Measure:
    """Padding rows and tokens do not change the answer."""
    with opened(tiny) as runner:
        tokens = most_tokens(runner.limits, 9)
        prompt = some_ids(tiny, tokens)
        blocks = first_blocks(runner, 64)
        limits = runner.limits
        padding = most_tokens(limits, 14) - tokens, most_rows(limits, 4, 14) - 1
        answer = answer_alone(
            runner, prompt, COUNT, chunks=(tokens,), blocks=blocks, padding=padding
        )
    return tiny.judge(prompt, answer)


def _uniforms(tiny: Tiny) -> None:
    """The sampled token is that whose cumulative range contains the uniform."""
    with opened(tiny) as runner:
        limits = runner.limits
        prompt = some_ids(tiny, min(6, most_tokens(limits, 6)))
        logits = tiny.logits(prompt)[-1] / 0.8
        total = np.cumsum(np.exp(logits - logits.max()))
        total /= total[-1]
        slack = BOUNDS[tiny.dtype]
        for step, uniform in enumerate((0.03, 0.3, 0.55, 0.8, 0.999), start=1):
            blocks = first_blocks(runner, len(prompt))
            runner.submit(admission(limits, 1, blocks, temperature=0.8))
            parts = [(1, prompt, uniform)]
            frame = one_step(limits, parts, step=step, decoding=0, sampler="sample")
            runner.submit(frame)
            token = int(runner.collect().tokens[0, 0])
            low, high = (total[token - 1] if token else 0.0), total[token]
            require(
                low - slack <= uniform <= high + slack,
                f"uniform {uniform} at temperature 0.8: found token {token}, whose "
                f"cumulative range in the order of ids is {low:.4g} to {high:.4g}; "
                f"seed {tiny.target.seed}",
            )
            runner.submit(
                release_frame(
                    1,
                    groups=limits.groups,
                    max_blocks_per_seq=limits.max_blocks_per_seq,
                )
            )
