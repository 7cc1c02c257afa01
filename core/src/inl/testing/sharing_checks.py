"""Checks of a runner beside others: two at once, in another thread, for many steps."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inl.dtypes import wrap
from inl.errors import message
from inl.spec.message import release_frame
from inl.testing.check import CheckFailed, Measure, require, worst
from inl.testing.play import admission, answer_alone, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, opened, some_ids

if TYPE_CHECKING:
    from inl.runners.local_runner import LocalRunner
    from inl.testing.oracle import Tiny

WINDOWS, MOST_WINDOWS = 3, 16
"""Parts of the steps whose memory is measured; a leak grows in each after the first.
More are measured while it grows: caches of a library fill more and more slowly."""
SEQUENCES, TOKENS = 3, 16
"""Sequences of a part, and steps of each."""
PROBE: Final = 64 << 20
"""Bytes of a tensor that shows where tensors are."""
NEW_STATE: Final = (
    "Backend.state must return new arrays for each runner, programs must not keep "
    "them, and closing one must leave those of the other"
)
STEPS: Final = SEQUENCES * TOKENS
"""Steps of a part."""
LEAST_LEAK: Final = 1 << 16
"""Bytes a step; less than that is hidden by the allocator's own pages."""
LEAST_OBJECTS: Final = STEPS // 2
"""Python objects of a part: other threads may free some of what a leak adds."""


def two_runners(tiny: Tiny) -> Measure:
    """Two runners of one backend have caches and tables of their own.

    The first one goes on after the other has been closed.
    """
    names = "first", "second"
    prompts = [some_ids(tiny, 7, name) for name in names]
    answers: list[list[int]] = [[], []]
    with opened(tiny) as runner:
        _begin(runner, prompts[0])
        answers[0].append(_decode(runner, prompts[0], 1))
        try:
            _in_turn(tiny, runner, prompts, answers)
        except Exception as error:
            raise CheckFailed(
                f"two runners of one backend: raised {type(error).__name__}: "
                f"{message(error)}; {NEW_STATE}"
            ) from error
    judged = []
    for which, prompt, answer in zip(names, prompts, answers, strict=True):
        try:
            judged.append(tiny.judge(prompt, answer))
        except AssertionError as error:
            error.args = (
                f"two runners of one backend: the {which} one answers otherwise than "
                f"alone; {NEW_STATE}. {error}",
            )
            raise
    return worst(judged)


def _in_turn(
    tiny: Tiny, runner: LocalRunner, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Compute two prompts in turn, the second in another runner, which is closed."""
    other = tiny.runner()
    try:
        _begin(other, prompts[1])
        answers[1].append(_decode(other, prompts[1], 1))
        for step in range(2, 9):
            for each, answer in zip((runner, other), answers, strict=True):
                answer.append(_decode(each, [-1], step))
    finally:
        other.close()
    answers[0] += [_decode(runner, [-1], step) for step in range(9, 12)]


def _begin(runner: LocalRunner, prompt: list[int]) -> None:
    blocks = first_blocks(runner, len(prompt) + 32)
    runner.submit(admission(runner.limits, 1, blocks))


def _decode(runner: LocalRunner, tokens: list[int], step: int) -> int:
    decoding = int(tokens == [-1])
    runner.submit(one_step(runner.limits, [(1, tokens)], step=step, decoding=decoding))
    return int(runner.collect().tokens[0, 0])


def in_thread(tiny: Tiny) -> Measure:
    """A runner answers in another thread than that which made it, as in a server.

    A second sequence is computed in both threads in turn.
    """
    with opened(tiny) as runner:
        count = most_tokens(runner.limits, 11)
        prompt = some_ids(tiny, count, "thread")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                answer_alone, runner, prompt, 8, chunks=(count,),
                blocks=first_blocks(runner, 64),
            ).result()  # fmt: skip
            other = some_ids(tiny, count, "threads in turn")
            _begin(runner, other)
            turns = []
            for step, tokens in enumerate((other, *[[-1]] * 7), 20):
                turn = partial(_decode, runner, tokens, step)
                turns.append(pool.submit(turn).result() if step % 2 else turn())
    judged = [tiny.judge(prompt, answer)]
    try:
        judged.append(tiny.judge(other, turns))
    except AssertionError as error:
        error.args = (
            f"a sequence that two threads compute in turn: {error}; look for state "
            "of a thread, such as a buffer in threading.local",
        )
        raise
    return worst(judged)


class _Held(NamedTuple):
    """What the process and the device hold."""

    host: int
    """Resident bytes of the process; 0 where the system does not say."""
    device: int
    """Bytes in use on a device with memory of its own."""
    objects: int
    """Blocks of memory of Python objects."""


def memory(tiny: Tiny) -> Measure:
    """Steps keep no memory: of the host, of the device, or as Python objects."""
    with opened(tiny) as runner:
        numbers = iter(range(1, 1 << 20))
        on_host = _on_host(tiny)
        held: list[_Held] = []
        while len(held) < 2 + WINDOWS or (_grows(held) and len(held) < MOST_WINDOWS):
            _run_part(runner, tiny, numbers)
            gc.collect()
            held.append(_held(tiny, on_host=on_host))
    pairs = list(itertools.pairwise(held[1:]))
    grown = _growth(held)
    kept = max(grown.host, grown.device) / STEPS
    measure = Measure(max(kept, 0.0), LEAST_LEAK)
    require(
        measure.ratio <= 1,
        f"each step keeps {kept / 1024:.4g} KiB ({max(grown.device, 0) // STEPS} bytes "
        f"of the device) in each of {len(pairs)} parts of {STEPS} steps, accepted: "
        f"{LEAST_LEAK // 1024} KiB; a program must drop what it allocates",
        measure,
    )
    require(
        grown.objects < LEAST_OBJECTS,
        f"each step keeps {grown.objects / STEPS:.3g} more Python objects in each of "
        f"{len(pairs)} parts of {STEPS} steps; look for a list or cache that grows, "
        "such as one whose key is a step's number or the id of an array",
    )
    return measure


def _growth(held: list[_Held]) -> _Held:
    """Return the second least growth in a part after the first one.

    In one part the process may free what is older than the steps.
    """
    pairs = list(itertools.pairwise(held[1:]))
    return _Held(
        *(sorted(after[i] - before[i] for before, after in pairs)[1] for i in range(3))
    )


def _grows(held: list[_Held]) -> bool:
    grown = _growth(held)
    leaks = max(grown.host, grown.device) > LEAST_LEAK * STEPS
    return leaks or grown.objects >= LEAST_OBJECTS


def _run_part(runner: LocalRunner, tiny: Tiny, numbers: Iterator[int]) -> None:
    limits = runner.limits
    for _ in range(SEQUENCES):
        prompt = some_ids(tiny, 5, "memory")
        _begin(runner, prompt)
        for index in range(TOKENS):
            _decode(runner, [-1] if index else prompt, next(numbers))
        width = limits.max_blocks_per_seq
        runner.submit(release_frame(1, groups=limits.groups, max_blocks_per_seq=width))


def _held(tiny: Tiny, *, on_host: bool) -> _Held:
    info = tiny.target.backend.memory()
    used = 0 if on_host else info.total - info.free
    return _Held(_resident_bytes(), used, sys.getallocatedblocks())


def _on_host(tiny: Tiny) -> bool:
    """Return whether tensors are in the memory of the process."""
    before = _resident_bytes()
    tensor = tiny.target.backend.tensor(wrap(np.ones(PROBE >> 2, np.float32)))
    grown = _resident_bytes() - before
    del tensor
    return grown > PROBE // 2


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
