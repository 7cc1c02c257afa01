"""Turns: all rows are loaded at once, and in a turn each decodes and prefills once.

The memory of a shared machine changes its speed for seconds or minutes. The rates of a
turn are measured one right after the other, so their ratio compares equal machines.
"""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from peers.catalog import Row
from peers.commands import Failed, end_group, ended, parse_line, start_logged, too_late
from peers.progress import bar
from peers.report import Result, Spread

TOKENS = 16
"""Tokens that a row decodes in a turn."""
COLUMNS = {"decode_rate": "decode", "prefill_rate": "prefill 512"}
"""What a turn measures, all in tokens a second."""
END_SECONDS = 10
"""Time for a process to end by itself, with its children and its shared memory."""


class Player:
    """A row's process, which decodes and prefills once each time it is asked.

    limit: seconds for loading, and for each answer.
    """

    def __init__(
        self,
        command: list[object],
        log: Path,
        *,
        limit: float,
        settings: dict[str, str],
    ) -> None:
        self._log, self._limit = log, limit
        self._process = start_logged(
            command, log, stdin=subprocess.PIPE, environment=settings
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        # Reading a pipe has no limit, waiting for a thread has.
        self._reader = ThreadPoolExecutor(1)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises :class:`Failed`."""
        self._read()

    def take_turn(self) -> dict[str, float]:
        """Measure :data:`COLUMNS`. Raises :class:`Failed`."""
        with suppress(BrokenPipeError):  # how it ended is seen in what it printed
            self._in.write(b"\n")
            self._in.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        """Read one line; a process that does not print it is ended."""
        try:
            line = self._reader.submit(self._out.readline).result(self._limit)
        except TimeoutError:
            end_group(self._process)
            raise too_late(self._limit, self._log) from None
        if not line:
            self.end()
            raise ended(self._process.returncode, self._log)
        return parse_line(line.decode("utf-8", "replace"))

    def end(self) -> None:
        """End the process, by the end of its input if it can, and its children."""
        if self._in.closed:
            return
        try:
            with suppress(BrokenPipeError):
                self._in.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        finally:
            end_group(self._process)
            self._reader.shutdown()


Start = Callable[[Row], AbstractContextManager[Player]]


def take_turns(results: Sequence[Result], turns: int, start: Start) -> None:
    """Load all rows and let each take every turn; each turn begins with another.

    Turn 0 does not count. Rates and failures go into the results, also when this is
    interrupted, and all processes are ended.
    """
    with ExitStack() as stack:
        players = deque(_load(results, start, stack))
        for number in range(turns + 1):
            bar(number, turns + 1, "in turns")
            for result, player in list(players):
                try:
                    found = player.take_turn()
                except Failed as reason:
                    result.turns_failure = f"turn {number}: {reason}"
                    players.remove((result, player))
                    player.end()
                    continue
                if number:
                    result.turns.append(found)
            players.rotate(-1)
    bar(1, 1, "done")


def _load(
    results: Sequence[Result], start: Start, stack: ExitStack
) -> Iterator[tuple[Result, Player]]:
    """Give the rows that load; one after the other, so that none disturbs another."""
    for place, result in enumerate(results):
        bar(place, len(results), f"loading {result.row.title}")
        player = stack.enter_context(start(result.row))
        try:
            player.wait_ready()
        except Failed as reason:
            result.turns_failure = f"loading: {reason}"
            player.end()
            continue
        yield result, player


def compare_turns(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Give INL against each peer: medians, and the ratios within a turn.

    Only turns count that both took.
    """
    ours = [each for each in results if each.row.peer == "inl" and each.turns]
    theirs = [each for each in results if each.row.peer != "inl" and each.turns]
    return [
        _comparison(mine, its, column)
        for mine in ours
        for its in theirs
        for column in COLUMNS
    ]


def _comparison(mine: Result, its: Result, column: str) -> dict[str, Any]:
    pairs = [
        (one[column], other[column])
        for one, other in zip(mine.turns, its.turns, strict=False)
    ]
    return {
        "row": mine.row.title,
        "peer": its.row.title,
        "column": column,
        "turns": len(pairs),
        "inl": median(one for one, _ in pairs),
        "its": median(other for _, other in pairs),
        "ratio": Spread.of([one / other for one, other in pairs])._asdict(),
    }


def show_turns(results: Sequence[Result]) -> str:
    """Write what :func:`compare_turns` gives, and every failure."""
    lines = [_line(**each) for each in compare_turns(results)]
    failed = [each for each in results if each.turns_failure]
    lines += [f"  {each.row.title}: FAILED: {each.turns_failure}" for each in failed]
    return "\n".join(lines)


def _line(
    row: str,
    peer: str,
    column: str,
    turns: int,
    inl: float,
    its: float,
    ratio: Mapping[str, float],
) -> str:
    return (
        f"  {row}, {COLUMNS[column]}: {ratio['median']:.2f} ({ratio['least']:.2f} to "
        f"{ratio['most']:.2f}) in {turns} turns ({inl:.4g}; {peer}: {its:.4g})"
    )
