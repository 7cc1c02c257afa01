"""Promises of a runner, seen from outside: frames go in, and tokens come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from inl.spec.message import BlockTableUpdate, release_frame
from inl.testing.check import Check, Measure, equal, require, worst
from inl.testing.near_tie import BOUNDS
from inl.testing.oracle import Tiny, prompt_logits, tinies
from inl.testing.play import admission, answer_alone, most_tokens, one_step
from inl.testing.runner_frames import (
    bad_frames,
    close,
    feedback,
    first_blocks,
    masks,
    opened,
    some_ids,
)
from inl.testing.traffic import Traffic, play

if TYPE_CHECKING:
    from inl.testing.target import Target

COUNT = 8
"""Tokens that each answer has."""


def runner_checks(target: Target) -> Iterator[Check]:
    """A tiny Llama behind the runner of the backend, against float64."""
    found: dict[str, Callable[[Tiny], Measure | None]] = {
        "logits": _logits,
        "traffic": _traffic,
        "chunks": _chunks,
        "placement": _placement,
        "padding": _padding,
        "feedback": feedback,
        "uniforms": _uniforms,
        "masks": masks,
        "bad_frames": bad_frames,
        "close": close,
    }
    for tiny in tinies(target):
        for name, run in found.items():
            yield Check("runner", f"runner/{name}/{tiny.dtype}", partial(run, tiny))


def _logits(tiny: Tiny) -> Measure:
    """The whole model errs a few times as much as NumPy with the same storage."""
    with opened(tiny) as runner:
        ids = some_ids(tiny, most_tokens(runner.limits, 37))
        found = prompt_logits(runner, ids)
    want = tiny.logits(ids)[-1]
    error = float(np.abs(found - want).max())
    bound = 4 * tiny.expected_error(ids) + 1e-6 * float(np.abs(want).max())
    require(
        error <= bound,
        f"logits of a tiny Llama in {tiny.dtype}: error {error:.3g} > {bound:.3g}, "
        f"four times what rounding costs; seed {tiny.target.seed}",
        Measure(error, bound),
    )
    return Measure(error, bound)


def _traffic(tiny: Tiny) -> Measure:
    """Sequences that come and go, mixed chunks, scattered blocks, steps in flight."""
    steps = 300 if tiny.target.full else 60
    with opened(tiny) as runner:
        traffic = Traffic(tiny.target.rng("traffic"), runner.limits)
        texts = play(runner, traffic.frames(steps))
    equal("sequences without an answer", [t for t in texts.values() if not t], [])
    return worst([tiny.judge(traffic.prompts[n], text) for n, text in texts.items()])


def _chunks(tiny: Tiny) -> Measure:
    """One prompt at once, token by token, and unevenly: always the oracle's answer."""
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
    """Blocks in any order, and block table cells that come late."""
    measures = []
    for turn in range(3):
        with opened(tiny) as runner:
            rng = tiny.target.rng("blocks", turn)
            last = runner.limits.blocks[0] - 1
            blocks = [
                int(b) + 1
                for b in rng.permutation(last)[: runner.limits.max_blocks_per_seq]
            ]
            blocks[0] = last if last not in blocks else blocks[0]
            prompt = some_ids(tiny, most_tokens(runner.limits, 19), turn)
            chunks = (len(prompt),)
            answer = answer_alone(runner, prompt, COUNT, chunks=chunks, blocks=blocks)
        measures.append(tiny.judge(prompt, answer))
    return worst([*measures, _late_cells(tiny)])


def _late_cells(tiny: Tiny) -> Measure:
    with opened(tiny) as runner:
        limits, size = runner.limits, runner.limits.block_size
        prompt = some_ids(tiny, 5)
        runner.submit(admission(limits, 1, []))
        given, found, last = 0, [], limits.blocks[0] - 1
        for step in range(1, min(2 * size, 60) - len(prompt)):
            tokens = prompt if step == 1 else [-1]
            length = len(prompt) + step - 1
            cells = []
            while given * size < length:
                cells.append(BlockTableUpdate(0, 1, given, last - given))
                given += 1
            runner.submit(one_step(limits, [(1, tokens)], step=step,
                                   decoding=int(step > 1), cells=cells))  # fmt: skip
            found.append(int(runner.collect().tokens[0, 0]))
    return tiny.judge(prompt, found)


def _padding(tiny: Tiny) -> Measure:
    """Rows and tokens of nobody change nothing."""
    with opened(tiny) as runner:
        prompt = some_ids(tiny, 9)
        blocks = first_blocks(runner, 64)
        answer = answer_alone(
            runner, prompt, COUNT, chunks=(9,), blocks=blocks, padding=(5, 3)
        )
    return tiny.judge(prompt, answer)


def _uniforms(tiny: Tiny) -> None:
    """Each row draws by its own uniform number, where its probability has it."""
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
                f"uniform {uniform} at temperature 0.8 drew token {token}, whose share "
                f"is {low:.4g} to {high:.4g}; the host's number decides, in the order "
                f"of ids; seed {tiny.target.seed}",
            )
            runner.submit(
                release_frame(
                    1,
                    groups=limits.groups,
                    max_blocks_per_seq=limits.max_blocks_per_seq,
                )
            )
