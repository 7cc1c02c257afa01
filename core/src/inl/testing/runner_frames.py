"""Promises of a runner about single frames: order, masks, refusals, the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import RunnerError
from inl.spec.message import HEADER, MASKED
from inl.testing.check import CheckFailed, Measure, equal
from inl.testing.oracle import VOCAB, Tiny
from inl.testing.play import admission, one_step

if TYPE_CHECKING:
    from inl.executor.local_runner import LocalRunner


@contextmanager
def opened(tiny: Tiny, **changes: Any) -> Iterator[LocalRunner]:
    """A runner that is closed whatever happens."""
    runner = tiny.runner(**changes)
    try:
        yield runner
    finally:
        runner.close()


def some_ids(tiny: Tiny, count: int, *names: object) -> list[int]:
    """Random tokens, the same for the same names."""
    return [int(x) for x in tiny.target.rng("ids", *names).integers(0, VOCAB, count)]


def first_blocks(runner: LocalRunner, tokens: int) -> list[int]:
    """Blocks from 1 on that hold ``tokens`` tokens."""
    return list(range(1, 1 + -(-tokens // runner.limits.block_size)))


def feedback(tiny: Tiny) -> Measure:
    """Steps in flight feed their own tokens back; one too many is refused."""
    with opened(tiny) as runner:
        limits, prompt, found = runner.limits, some_ids(tiny, 7), []
        runner.submit(admission(limits, 1, first_blocks(runner, 64)))
        flying = 0
        for step in range(1, 21):
            if flying == limits.depth:
                if step == limits.depth + 1:
                    extra = one_step(limits, [(1, [-1])], step=step, decoding=1)
                    _refused(runner, extra, f"step {step} of {flying} in flight")
                found.append(int(runner.collect().tokens[0, 0]))
                flying -= 1
            tokens = prompt if step == 1 else [-1]
            runner.submit(
                one_step(limits, [(1, tokens)], step=step, decoding=int(step > 1))
            )
            flying += 1
        found += [int(runner.collect().tokens[0, 0]) for _ in range(flying)]
    return tiny.judge(prompt, found)


def masks(tiny: Tiny) -> Measure:
    """A masked step takes an allowed token, and goes on from that one."""
    with opened(tiny) as runner:
        limits, prompt = runner.limits, some_ids(tiny, 5)
        only = int(np.argmin(tiny.logits(prompt)[-1]))
        runner.submit(admission(limits, 1, first_blocks(runner, 64)))
        frame = one_step(limits, [(1, prompt)], step=1, decoding=0, flags=MASKED)
        runner.submit(frame)
        rows = int(frame[4])
        masks = np.zeros((rows, -(-VOCAB // 32)), np.int32)
        masks.view(np.uint32)[:, only // 32] = 1 << (only % 32)
        runner.sample(1, masks)
        equal("token under a mask of one", int(runner.collect().tokens[0, 0]), only)
        found = []
        for step in range(2, 8):
            runner.submit(one_step(limits, [(1, [-1])], step=step, decoding=1))
            found.append(int(runner.collect().tokens[0, 0]))
    return tiny.judge([*prompt, only], found)


def bad_frames(tiny: Tiny) -> Measure:
    """A bad frame is refused before anything happens: the answer goes on as if none."""
    with opened(tiny) as runner:
        limits, prompt, found = runner.limits, some_ids(tiny, 7), []
        runner.submit(admission(limits, 1, first_blocks(runner, 64)))
        for step in range(1, 12):
            tokens = prompt if step == 1 else [-1]
            good = one_step(limits, [(1, tokens)], step=step, decoding=int(step > 1))
            for name, bad in _spoiled(good, limits).items():
                _refused(runner, bad, name)
            runner.submit(good)
            found.append(int(runner.collect().tokens[0, 0]))
    return tiny.judge(prompt, found)


def _spoiled(good: Any, limits: Any) -> dict[str, Any]:
    def changed(place: int, value: int) -> Any:
        frame = good.copy()
        frame[place] = value
        return frame

    return {
        "another version": changed(0, 7),
        "an unknown kind": changed(1, 9),
        "a slot that is not there": changed(HEADER, limits.slots),
        "a negative slot": changed(HEADER, -1),
        "a token outside the vocabulary": changed(len(good) - 1, VOCAB),
        "a frame cut short": good[:-1],
        "a frame too long": np.concatenate([good, good[:1]]),
        "a header alone": good[:HEADER],
        "an admission to no slot": admission(limits, limits.slots, [1]),
        "an admission to no block": admission(limits, 1, [limits.blocks[0]]),
    }


def _refused(runner: LocalRunner, frame: Any, what: str) -> None:
    try:
        runner.submit(frame)
    except RunnerError:
        return
    except Exception as error:
        raise CheckFailed(
            f"{what}: raised {type(error).__name__}: {error}; expected ProtocolError"
        ) from error
    raise CheckFailed(f"{what}: was taken; expected ProtocolError")


def close(tiny: Tiny) -> None:
    """Closing twice is allowed, and a closed runner computes nothing."""
    with opened(tiny) as runner:
        runner.close()
        runner.close()
        _refused(runner, admission(runner.limits, 1, [1]), "a frame after close")
