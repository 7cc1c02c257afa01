"""Checks of steps that are rare: repeated ones, ones without memory, long ones.

Each names the capability or the rule that a wrong answer points to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inl.backend.base import ContextLengths
from inl.errors import OutOfMemory, message
from inl.executor.context_lengths import table_widths
from inl.runners.local_runner import LocalRunner
from inl.spec.message import FEEDBACK, BlockTableUpdate, Row, step_frame
from inl.spec.selection import KernelSelection
from inl.spec.step import NO_TOKEN, Bucket
from inl.spec.tree import leaves
from inl.testing.check import CheckFailed, Measure, require, worst
from inl.testing.play import admission, most_rows, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, opened, some_ids

if TYPE_CHECKING:
    from inl.protocol.runner import Limits, Runner
    from inl.testing.oracle import Tiny

STEPS: Final = 4
"""Steps of a repeated step."""
LONGEST: Final = 600
"""Tokens of the longest sequence that is computed to change the program's length."""


def repeated(tiny: Tiny) -> Measure:
    """A repeated step samples what single steps do, until each row has ended."""
    with opened(tiny, decode_steps=STEPS) as runner:
        rows = most_rows(runner.limits, 3)
        prompts = [some_ids(tiny, 3 + row, "repeated", row) for row in range(rows)]
        single = _begun(runner, prompts)
        for step in range(STEPS + 1):
            parts = [(slot, [-1]) for slot in range(1, rows + 1)]
            runner.submit(one_step(runner.limits, parts, step=50 + step, decoding=rows))
            found = runner.collect().tokens[:rows, 0].tolist()
            single = [[*each, token] for each, token in zip(single, found, strict=True)]
        _judged(tiny, prompts, single, "single steps")
        answers = _begun(runner, prompts)
        # The first row ends at a token, the second after two steps and the third at the
        # end; these two go on in a single step.
        ends = [single[0][2]], (), ()
        counts = STEPS, 2, STEPS
        asked = list(zip(counts, ends, strict=True))[:rows]
        tokens = _collected(runner, _repeated_frame(runner.limits, asked))
        for row, (count, stops) in enumerate(asked):
            answers[row] += _sampled(tokens[row].tolist(), count, stops, row)
        if rows > 1:
            parts = [(slot, [-1]) for slot in range(2, rows + 1)]
            frame = one_step(runner.limits, parts, step=90, decoding=rows - 1)
            runner.submit(frame)
            last = runner.collect().tokens[: rows - 1, 0].tolist()
            answers[1:] = [
                [*each, token] for each, token in zip(answers[1:], last, strict=True)
            ]
        kind = "in one program" if runner.executor.loops else "one by one"
    what = f"a repeated step of {STEPS} steps, computed {kind}"
    return _judged(tiny, prompts, answers, what)


def _collected(runner: Runner, frame: Any) -> Any:
    """Return the tokens of a repeated step."""
    try:
        runner.submit(frame)
        return runner.collect().tokens
    except Exception as error:
        raise CheckFailed(
            f"repeated step: raised {type(error).__name__}: {message(error)}; look at "
            "DeviceLoops.while_loop and the functions of its arrays"
        ) from error


def _begun(runner: Runner, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Admit prompts, compute them, and return the first token of each."""
    answers = []
    for slot, prompt in enumerate(prompts, 1):
        blocks = first_blocks(runner, 32)
        own = [block + (slot - 1) * len(blocks) for block in blocks]
        runner.submit(admission(runner.limits, slot, own))
        frame = one_step(runner.limits, [(slot, prompt)], step=slot, decoding=0)
        runner.submit(frame)
        answers.append([int(runner.collect().tokens[0, 0])])
    return answers


def _repeated_frame(limits: Limits, rows: Sequence[tuple[int, Sequence[int]]]) -> Any:
    """Return a repeated step; rows: steps and stop ids of the slots from 1."""
    repeats = [each for each in limits.buckets if each.repeat == STEPS]
    fits = [each for each in repeats if each.rows >= len(rows)]
    exact = Bucket(tokens=len(rows), rows=len(rows), repeat=STEPS)
    bucket = min(fits, key=lambda each: each.rows) if limits.buckets else exact
    return step_frame(
        bucket,
        [
            Row(slot, FEEDBACK, steps=steps, stop_ids=stops)
            for slot, (steps, stops) in enumerate(rows, 1)
        ],
        step=80, groups=limits.groups, block_size=limits.block_size,
        decode_rows=len(rows),
    )  # fmt: skip


def _sampled(
    tokens: list[int], steps: int, stops: Sequence[int], row: int
) -> list[int]:
    """Return the tokens of a row, behind which there must be none."""
    found = tokens[:steps]
    at = next((at for at, token in enumerate(found) if token in stops), steps - 1)
    wanted = [*found[: at + 1], *[NO_TOKEN] * (STEPS - at - 1)]
    require(
        tokens == wanted,
        f"repeated step: row {row} of {steps} steps with the stop ids {list(stops)} "
        f"has {tokens}, expected {wanted}: its tokens, then {NO_TOKEN}; look at "
        "DeviceLoops.while_loop, and at `where` and `concatenate` of its arrays",
    )
    return found[: at + 1]


def _judged(
    tiny: Tiny, prompts: Sequence[list[int]], answers: Sequence[list[int]], what: str
) -> Measure:
    measures = []
    for prompt, answer in zip(prompts, answers, strict=True):
        try:
            measures.append(tiny.judge(prompt, answer))
        except CheckFailed as error:
            raise CheckFailed(f"{what}: {error}", error.measure) from error
    return worst(measures)


class FailingStep:
    """Kernels of an op that raise as a device without memory does, while it is set."""

    def __init__(self) -> None:
        self.is_set = False
        self.calls = 0

    def wrapped(self, selection: KernelSelection) -> KernelSelection:
        """Return kernels whose first one of a step may fail."""
        return replace(
            selection,
            kernels=tuple(
                replace(kernel, run=self._failing(kernel.run))
                if kernel.op == "make_step"
                else kernel
                for kernel in selection.kernels
            ),
        )

    def _failing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def make_step(*args: Any, **attrs: Any) -> Any:
            if self.is_set:
                self.calls += 1
                raise OutOfMemory("inl check: 4 bytes do not fit")
            return run(*args, **attrs)

        return make_step


@contextmanager
def failing_runner(tiny: Tiny, failing: FailingStep) -> Iterator[LocalRunner]:
    """Make a runner whose programs are compiled while a kernel fails, or after."""
    with opened(tiny) as first:
        selection = failing.wrapped(first.loaded.selection)
        loaded = replace(first.loaded, selection=selection)
        runner = LocalRunner(tiny.target.backend, loaded, first.limits)
        try:
            yield runner
        finally:
            runner.close()


def out_of_memory(tiny: Tiny) -> Measure | None:
    """A step without memory raises OutOfMemory; other sequences go on.

    The error comes from the first kernel of a step, before it consumes anything, in the
    first call of its program: while it is traced, or while it runs. Nothing for kernels
    that are not called there.
    """
    failing = FailingStep()
    with failing_runner(tiny, failing) as runner:
        limits = runner.limits
        prompts = [some_ids(tiny, 2, "memory a"), some_ids(tiny, 9, "memory b")]
        prompts[1] = prompts[1][: most_tokens(limits, 9)]
        blocks = first_blocks(runner, 32)
        runner.submit(admission(limits, 1, blocks))
        answer: list[int] = []
        for step, token in enumerate((*prompts[0], -1, -1), 1):
            parts = [(1, [token])]
            runner.submit(one_step(limits, parts, step=step, decoding=int(token == -1)))
            answer.append(int(runner.collect().tokens[0, 0]))
        answer = answer[1:]
        others = [block + len(blocks) for block in blocks]
        failing.is_set = True
        runner.submit(admission(limits, 2, others))
        frame = one_step(limits, [(2, prompts[1])], step=10, decoding=0)
        raised = _raised(runner, frame)
        failing.is_set = False
        if not failing.calls:
            return None
        _require_raised(raised)
        for step in range(11, 15):
            answer.append(_after(runner, 1, [-1], step))
        runner.submit(admission(limits, 2, others))
        again = [
            _after(runner, 2, prompts[1] if step == 15 else [-1], step)
            for step in range(15, 19)
        ]
    what = "after a step that raised OutOfMemory"
    return _judged(tiny, prompts, [answer, again], what)


def _raised(runner: LocalRunner, frame: Any) -> Exception | None:
    """Return what a step raises, when it is submitted or when it is read."""
    try:
        runner.submit(frame)
        runner.collect()
    # A backend may raise anything; the report shows it.
    except Exception as error:
        return error
    return None


def _require_raised(raised: Exception | None) -> None:
    if raised is None:
        raise CheckFailed(
            "a kernel raised OutOfMemory in a step, and neither the program nor "
            "reading its result did: do not catch it"
        )
    if not isinstance(raised, OutOfMemory):
        raise CheckFailed(
            f"a kernel raised OutOfMemory in a step, and the runner "
            f"{type(raised).__name__}: {message(raised)}; a program passes it on, "
            "while the state is still among its arguments: do not translate it, and "
            "keep the arguments until the result is there"
        ) from raised


def _after(runner: LocalRunner, slot: int, tokens: list[int], step: int) -> int:
    """Return the token of a step after one without memory."""
    decoding = int(tokens == [-1])
    raised = None
    try:
        frame = one_step(runner.limits, [(slot, tokens)], step=step, decoding=decoding)
        runner.submit(frame)
        return int(runner.collect().tokens[0, 0])
    except Exception as error:
        raised = error
    raise CheckFailed(
        f"a step after one that raised OutOfMemory raised {type(raised).__name__}: "
        f"{message(raised)}; the state that the failed program got must stay usable"
    ) from raised


def longer_contexts(tiny: Tiny) -> Measure | None:
    """A sequence grows out of the shortest program of ``ContextLengths``.

    Nothing without the capability, or if its shortest length is long.
    """
    if tiny.target.backend.offers(ContextLengths) is None:
        return None
    size = tiny.limits().block_size
    columns = -(-2 * LONGEST // size)
    limits = tiny.limits(max_blocks_per_seq=columns, blocks=(columns + 2,))
    widths = table_widths(tiny.target.backend, limits)
    if not widths or widths[0] * size > LONGEST:
        return None
    border = widths[0] * size
    ids = some_ids(tiny, border - 2, "lengths")
    with opened(tiny, max_blocks_per_seq=columns, blocks=limits.blocks) as runner:
        runner.submit(admission(runner.limits, 1, list(range(1, widths[0] + 1))))
        part = most_tokens(runner.limits, 64)
        for step, start in enumerate(range(0, len(ids), part), 1):
            tokens = ids[start : start + part]
            frame = one_step(runner.limits, [(1, tokens)], step=step, decoding=0)
            runner.submit(frame)
            answer = [int(runner.collect().tokens[0, 0])]
        new_block = BlockTableUpdate(0, 1, widths[0], widths[0] + 1)
        for number in range(1, 6):
            frame = one_step(
                runner.limits, [(1, [-1])], step=step + number, decoding=1,
                updates=[new_block] if number == 3 else (),
            )  # fmt: skip
            runner.submit(frame)
            answer.append(int(runner.collect().tokens[0, 0]))
    what = (
        f"a sequence that grows from the program of {border} tokens to that of "
        f"{widths[1] * size if len(widths) > 1 else columns * size}"
    )
    return _judged(tiny, [ids], [answer], what)


def closed(tiny: Tiny) -> None:
    """The state of a runner that was closed is gone once another one has begun.

    Until then a backend may keep it, see :class:`~inl.backend.base.CachedMemory`.
    """
    references = _state_of_closed(tiny)
    _state_of_closed(tiny)
    gc.collect()
    for name, those in references.items():
        alive = sum(reference() is not None for reference in those)
        require(
            not alive,
            f"{alive} of {len(those)} {name} of a runner that was closed are in use "
            "after another one has computed: something keeps them, such as a global "
            "list, or a closure of `compile`",
        )


def _state_of_closed(tiny: Tiny) -> dict[str, list[weakref.ref[Any]]]:
    """Compute a step in a runner and close it; returns references to its tensors."""
    runner = tiny.runner()
    runner.submit(admission(runner.limits, 1, first_blocks(runner, 16)))
    runner.submit(one_step(runner.limits, [(1, [5, 6])], step=1, decoding=0))
    runner.collect()
    state = runner.executor.state
    found = {"caches": _watched(state.caches), "tables": _watched(state.tables)}
    del state
    runner.close()
    return found


def _watched(tree: Any) -> list[weakref.ref[Any]]:
    """Return references to the tensors that a library lets be watched."""
    found = []
    for leaf in leaves(tree):
        with suppress(TypeError):
            found.append(weakref.ref(leaf))
    return found
