"""Rounds summed up: medians, ratios to the best peer, shares, the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peers.catalog import Row


class Column(NamedTuple):
    """One column of the table."""

    key: str
    title: str
    digits: int
    less_is_better: bool = False


COLUMNS = (
    Column("ready_seconds", "ready s", 2, less_is_better=True),
    Column("first_token_ms", "first token ms", 0, less_is_better=True),
    Column("prefill_rate", "prefill 512", 0),
    Column("decode_rate", "decode", 0),
    Column("c8_rate", "c8", 0),
    Column("c32_rate", "c32", 0),
    Column("alone_mb", "MB, 1 request", 0, less_is_better=True),
    Column("peak_mb", "peak MB", 0, less_is_better=True),
)


class Spread(NamedTuple):
    """Several rounds of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Result:
    """All rounds of one row, or why there are none."""

    row: Row
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    weight_bytes: int | None = None
    text: str = ""
    agrees: int = 0
    """Tokens at the begin of its answer that are those of float32."""
    sensible: bool = True
    turns: list[dict[str, float]] = field(default_factory=list)
    """What each turn that counts measured."""
    turns_failure: str = ""
    """Why its turns ended; what it did in the rounds stays."""

    def spread(self, key: str) -> Spread | None:
        """Sum up one column; ``None`` where it was not measured."""
        values = [each[key] for each in self.rounds if each.get(key) is not None]
        return Spread.of(values) if values else None

    @property
    def counts(self) -> bool:
        """Whether the row may win: it ran in every round and is not broken."""
        return bool(self.rounds) and not self.failures and self.sensible

    def share(self, bandwidth: float | None) -> float | None:
        """Part of the read bandwidth that decoding its weights took."""
        decode = self.spread("decode_rate")
        if decode is None or not bandwidth or not self.weight_bytes:
            return None
        return decode.median * self.weight_bytes / bandwidth


def judge(result: Result, facts: Mapping[str, Any]) -> None:
    """Compare the answer to the question with float32's.

    A peer is broken if its first token is not among float32's ten likeliest, or if it
    says one token only; quantized ones may well leave float32's words later.
    """
    said = result.rounds[-1]["said"]
    same = [mine == its for mine, its in zip(said, facts["answer"], strict=False)]
    result.agrees = same.index(False) if False in same else len(same)
    result.sensible = said[0] in facts["likeliest"] and len(set(said)) > 1


def best_peer(results: Sequence[Result], column: Column) -> Result | None:
    """Find the peer with the best median of a column."""
    found = [
        (each.spread(column.key), each)
        for each in results
        if each.row.peer != "inl" and each.counts
    ]
    measured = [(spread.median, each) for spread, each in found if spread]
    if not measured:
        return None
    pick = min if column.less_is_better else max
    return pick(measured, key=lambda pair: pair[0])[1]


def ratio(ours: float, peers: float, column: Column) -> float:
    """Say how far ahead we are: over 1 is better, whichever way the column goes."""
    return peers / ours if column.less_is_better else ours / peers


def ratios(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Give INL against the best peer: a line for each row of INL and column."""
    lines = []
    for mine in (each for each in results if each.row.peer == "inl" and each.counts):
        for column in COLUMNS:
            ours, best = mine.spread(column.key), best_peer(results, column)
            its = best.spread(column.key) if best else None
            if ours is None or best is None or its is None:
                continue
            value = ratio(ours.median, its.median, column)
            lines.append(
                {
                    "row": mine.row.title,
                    "column": column.title,
                    "inl": ours.median,
                    "best": its.median,
                    "peer": best.row.title,
                    "ratio": value,
                }
            )
    return lines


def table(results: Sequence[Result], bandwidth: float | None) -> str:
    """Write the table in Markdown: medians, then least to most, best peers in bold."""
    best = {column.key: best_peer(results, column) for column in COLUMNS}
    head = ["row", *(column.title for column in COLUMNS), "% of bandwidth"]
    lines = [_line(head), _line(["---"] * len(head))]
    for result in results:
        cells = [result.row.title]
        if not result.rounds:
            lines.append(_line([*cells, f"not run: {result.failures[0]}"]))
            continue
        for column in COLUMNS:
            text = _cell(result.spread(column.key), column)
            wins = best[column.key] is result
            cells.append(f"**{text}**" if wins else text)
        share = result.share(bandwidth)
        cells.append("" if share is None else f"{100 * share:.0f}")
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(spread: Spread | None, column: Column) -> str:
    if spread is None:
        return "-"
    median, least, most = (f"{value:.{column.digits}f}" for value in spread)
    return median if least == most else f"{median} ({least} to {most})"


def answers(results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    """Show what each row answers to the question."""
    lines = [f"{facts['question']} ... (float32 says {len(facts['answer'])} tokens)"]
    for result in (each for each in results if each.rounds):
        word = "" if result.sensible else "  BROKEN: cannot win a column"
        lines.append(
            f"  {result.row.title:<40} {result.agrees:>2} as float32  "
            f"{result.text!r}{word}"
        )
    return "\n".join(lines)


def notes(results: Sequence[Result]) -> str:
    """Say the versions and modes, and every failure."""
    lines = []
    for result in results:
        if result.rounds:
            last = result.rounds[-1]
            names = [f"{name} {value}" for name, value in last["versions"].items()]
            lines.append(f"  {result.row.title}: {', '.join(names)}; {last['mode']}")
        lines += [f"  {result.row.title}: FAILED: {why}" for why in result.failures]
    return "\n".join(lines)


def show_ratios(lines: Sequence[Mapping[str, Any]]) -> str:
    """Write what :func:`ratios` gives; over 1 is ahead of every peer."""
    return "\n".join(
        f"  {line['row']}, {line['column']}: {line['ratio']:.2f} "
        f"({line['inl']:.4g}; {line['peer']}: {line['best']:.4g})"
        for line in lines
    )
