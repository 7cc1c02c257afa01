"""Contract checks of a runner's call rules: feedback, masks, bad frames, close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import RunnerError
from inl.spec.message import HEADER, HEADER_WORD, MASKED
from inl.testing.check import CheckFailed, Measure, equal
from inl.testing.oracle import VOCAB, Tiny
from inl.testing.play import admission, one_step

if TYPE_CHECKING:
    from inl.protocol.runner import Runner
    from inl.runners.local_runner import LocalRunner


@contextmanager
def opened(tiny: Tiny, **changes: Any) -> Iterator[LocalRunner]:
    """Make a runner, or reset one that an earlier check has used.

    A runner whose limits are ``changes`` is closed at the end, and so is one whose
    check has failed.
    """
    runner = tiny.idle.pop() if tiny.idle and not changes else tiny.runner(**changes)
    try:
        yield runner
        if not changes:
            runner.reset()
            tiny.idle.append(runner)
    finally:
        if runner not in tiny.idle:
            runner.close()


def some_ids(tiny: Tiny, count: int, *names: object) -> list[int]:
    """Return random tokens, seeded by the names."""
    return [int(x) for x in tiny.target.rng("ids", *names).integers(0, VOCAB, count)]


def first_blocks(runner: Runner, tokens: int) -> list[int]:
    """Return the ids of the first blocks, from 1, for ``tokens`` tokens."""
    return list(range(1, 1 + -(-tokens // runner.limits.block_size)))


def feedback(tiny: Tiny) -> Measure:
    """Steps in flight feed their tokens back; one beyond the depth is refused.

    Frames change as soon as they are submitted: a program has copied its own.
    """
    with opened(tiny) as runner:
        limits, prompt, answer = runner.limits, some_ids(tiny, 7), []
        runner.submit(admission(limits, 1, first_blocks(runner, 64)))
        in_flight = 0
        for step in range(1, 21):
            if in_flight == limits.depth:
                if step == limits.depth + 1:
                    extra = one_step(limits, [(1, [-1])], step=step, decoding=1)
                    what = f"step {step} with {in_flight} in flight"
                    _check_refused(runner, extra, what)
                answer.append(int(runner.collect().tokens[0, 0]))
                in_flight -= 1
            tokens = prompt if step == 1 else [-1]
            frame = one_step(limits, [(1, tokens)], step=step, decoding=int(step > 1))
            runner.submit(frame)
            frame[:] = -7
            in_flight += 1
        answer += [int(runner.collect().tokens[0, 0]) for _ in range(in_flight)]
    return tiny.judge(prompt, answer)


def masks(tiny: Tiny) -> Measure:
    """A masked step samples an allowed token, which the next step feeds back."""
    with opened(tiny) as runner:
        limits, prompt = runner.limits, some_ids(tiny, 5)
        only = int(np.argmin(tiny.logits(prompt)[-1]))
        runner.submit(admission(limits, 1, first_blocks(runner, 64)))
        frame = one_step(limits, [(1, prompt)], step=1, decoding=0, flags=MASKED)
        runner.submit(frame)
        rows = int(frame[HEADER_WORD.rows])
        masks = np.zeros((rows, -(-VOCAB // 32)), np.int32)
        masks.view(np.uint32)[:, only // 32] = 1 << (only % 32)
        runner.sample(1, masks)
        equal("token under a mask of one", int(runner.collect().tokens[0, 0]), only)
        answer = []
        for step in range(2, 8):
            runner.submit(one_step(limits, [(1, [-1])], step=step, decoding=1))
            answer.append(int(runner.collect().tokens[0, 0]))
    return tiny.judge([*prompt, only], answer)


def bad_frames(tiny: Tiny) -> Measure:
    """A bad frame is refused and does not change the answer."""
    with opened(tiny) as runner:
        limits, prompt, answer = runner.limits, some_ids(tiny, 7), []
        runner.submit(admission(limits, 1, first_blocks(runner, 64)))
        for step in range(1, 12):
            tokens = prompt if step == 1 else [-1]
            good = one_step(limits, [(1, tokens)], step=step, decoding=int(step > 1))
            for name, bad in _bad_frames(good, limits).items():
                _check_refused(runner, bad, name)
            runner.submit(good)
            answer.append(int(runner.collect().tokens[0, 0]))
    return tiny.judge(prompt, answer)


def _bad_frames(good: Any, limits: Any) -> dict[str, Any]:
    def changed(word: int, value: int) -> Any:
        frame = good.copy()
        frame[word] = value
        return frame

    return {
        "another version": changed(HEADER_WORD.version, 7),
        "an unknown kind": changed(HEADER_WORD.kind, 9),
        "a slot beyond the limits": changed(HEADER, limits.slots),
        "a negative slot": changed(HEADER, -1),
        "a token outside the vocabulary": changed(len(good) - 1, VOCAB),
        "a truncated frame": good[:-1],
        "a frame too long": np.concatenate([good, good[:1]]),
        "a header alone": good[:HEADER],
        "an admission to a slot beyond the limits": admission(
            limits, limits.slots, [1]
        ),
        "an admission with a block beyond the limits": admission(
            limits, 1, [limits.blocks[0]]
        ),
    }


def _check_refused(runner: LocalRunner, frame: Any, what: str) -> None:
    try:
        runner.submit(frame)
    except RunnerError:
        return
    except Exception as error:
        raise CheckFailed(
            f"{what}: raised {type(error).__name__}: {error}; expected ProtocolError"
        ) from error
    raise CheckFailed(f"{what}: was accepted; expected ProtocolError")


def close(tiny: Tiny) -> None:
    """Closing twice is allowed, and a closed runner refuses frames."""
    runner = tiny.runner()
    runner.close()
    runner.close()
    _check_refused(runner, admission(runner.limits, 1, [1]), "a frame after close")
