"""Turns, with drivers whose peer is made up."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import cpu_peers
import harness
import pytest
from peers.catalog import Row
from peers.report import Result
from peers.turns import TOKENS, compare_turns, show_turns

from waiting import is_running, until

DRIVER = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(cpu_peers.DRIVERS)!r})
from harness import Answered, Facts, Loaded, main

def load(job):
    mode, folder = job["mode"], Path(job["model"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / mode).write_text(f"{{os.getpid()}} {{child.pid}}")
    if mode == "unloadable":
        sys.exit("error: no such weights")
    calls = 0

    def note(text):
        with (folder / "journal").open("a") as file:
            file.write(f"{{mode}} {{text}}\\n")

    def answer(prompts, tokens):
        nonlocal calls
        calls += 1
        note(tokens)
        if mode == "hanging" and calls == 2:
            time.sleep(600)
        if calls == 6:  # in turn 2: the first call is that of loading, a turn has two
            if mode == "dying":
                sys.exit("error: out of memory")
            if mode == "interrupting":
                os.kill(os.getppid(), signal.SIGINT)
        return Answered([[7] * tokens for _ in prompts], 0.0)

    return Loaded(answer, lambda: Facts({{}}, ""), close=lambda: note("closed"))

main(load)
"""


def bench_of(folder: Path, modes: dict[str, str], **given: object) -> cpu_peers.Bench:
    """A bench whose rows, by their peers, run the driver above in a mode."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    bench = object.__new__(cpu_peers.Bench)
    settings = {"threads": 1, "isa": None, "limit": 300, "turns": 3} | given
    bench.options = SimpleNamespace(**settings)
    bench.cache, bench.sizes, bench.has_ended = folder, cpu_peers.QUICK, False
    bench.facts = {"vocabulary": 1000, "question_ids": [1], "answer": [2]}
    bench.jobs = {}
    for peer, mode in modes.items():
        more = {"model": str(folder), "mode": mode}
        bench.jobs[f"{peer}:mode"] = (Path(sys.executable), driver, more)
    return bench


def results_of(*peers: str) -> list[Result]:
    return [Result(Row(peer, peer, "mode", "source")) for peer in peers]


def turns_of(folder: Path, modes: dict[str, str], **given: object) -> list[Result]:
    results = results_of(*modes)
    bench_of(folder, modes, **given).take_turns(results)
    return results


def assert_ended(folder: Path, *modes: str) -> None:
    """No process of these rows runs, nor a child that it left behind."""
    for mode in modes:
        for pid in (folder / mode).read_text().split():
            until(lambda pid=int(pid): not is_running(pid))


def test_each_turn_begins_with_another_row(tmp_path: Path) -> None:
    results = turns_of(tmp_path, {"inl": "one", "a": "two"})
    assert [len(each.turns) for each in results] == [3, 3]
    assert all(min(turn.values()) > 0 for each in results for turn in each.turns)
    journal = (tmp_path / "journal").read_text().splitlines()
    assert journal[:2] == ["one 1", "two 1"]
    turns = ["one", "two"], ["two", "one"], ["one", "two"], ["two", "one"]
    rows = [row for turn in turns for row in turn]
    assert journal[2:18] == [f"{row} {n}" for row in rows for n in (TOKENS + 1, 1)]
    assert sorted(journal[18:]) == ["one closed", "two closed"]
    assert_ended(tmp_path, "one", "two")


def test_the_others_go_on_without_a_row_that_fails(tmp_path: Path) -> None:
    modes = {"a": "unloadable", "b": "dying", "inl": "one"}
    results = turns_of(tmp_path, modes)
    assert [len(each.turns) for each in results] == [0, 1, 3]
    lost, died, ours = (each.turns_failure for each in results)
    assert lost.startswith("loading: exit code 1: error: no such weights; see ")
    assert died.startswith("turn 2: exit code 1: error: out of memory; see ")
    assert not ours
    assert not any(each.failures for each in results)  # the rounds count still
    shown = show_turns(results).splitlines()
    assert "in 1 turns" in shown[0]
    assert shown[2:] == [f"  a: FAILED: {lost}", f"  b: FAILED: {died}"]
    assert_ended(tmp_path, *modes.values())


def test_a_row_past_its_limit_is_ended(tmp_path: Path) -> None:
    limit = 1
    while not (tmp_path / "journal").exists():
        # A busy machine may not load the row in the first limit.
        (result,) = turns_of(tmp_path, {"a": "hanging"}, limit=limit)
        assert f"took more than {limit} s" in result.turns_failure
        limit *= 2
    assert_ended(tmp_path, "hanging")


def test_turns_that_are_ended_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = {"inl": "one", "a": "interrupting"}
    bench, results = bench_of(tmp_path, modes), results_of(*modes)
    bench.take_turns(results)
    assert bench.has_ended
    assert [len(each.turns) for each in results] == [2, 1]
    assert "ended" in capsys.readouterr().err
    assert "in 1 turns" in show_turns(results)
    assert_ended(tmp_path, *modes.values())
    bench.take_turns(results)
    assert [len(each.turns) for each in results] == [2, 1]


def test_only_rows_without_failures_take_turns(tmp_path: Path) -> None:
    bench, results = bench_of(tmp_path, {"inl": "one"}, turns=1), results_of("inl", "a")
    results[1].failures.append("no wheel")
    bench.take_turns(results)
    assert [len(each.turns) for each in results] == [1, 0]
    assert not results[1].turns_failure
    bench.options.turns = 0
    bench.take_turns(results)
    assert len(results[0].turns) == 1


def turns(rates: list[float]) -> list[dict[str, float]]:
    return [{"decode_rate": rate, "prefill_rate": 2 * rate} for rate in rates]


def test_ratios_are_those_within_a_turn() -> None:
    ours, steady, short, lost = results_of("inl", "a", "b", "c")
    ours.turns, steady.turns = turns([40, 10, 90]), turns([20, 10, 30])
    short.turns = turns([80])
    ours.rounds = steady.rounds = [{"decode_rate": 1}]
    first, prefill, second, _ = compare_turns([ours, steady, short, lost])
    assert first == {
        "row": "inl",
        "peer": "a",
        "column": "decode_rate",
        "turns": 3,
        "inl": 40,
        "its": 20,
        "ratio": {"median": 2, "least": 1, "most": 3},
    }
    assert prefill == first | {"column": "prefill_rate", "inl": 80, "its": 40}
    assert (second["turns"], second["ratio"]["median"]) == (1, 0.5)
    assert show_turns([ours, steady]).splitlines() == [
        "  inl, decode: 2.00 (1.00 to 3.00) in 3 turns (40; a: 20)",
        "  inl, prefill 512: 2.00 (1.00 to 3.00) in 3 turns (80; a: 40)",
    ]
    about = {"read_bandwidth": {"median": 1e9}}
    found = json.loads(json.dumps(cpu_peers.record(about, [ours, steady])))
    assert [row["turns"] for row in found["rows"]] == [ours.turns, steady.turns]
    assert found["turns"] == [first, prefill]


@pytest.mark.parametrize("tells", [True, False])
def test_a_turn_is_timed_after_the_first_token(
    monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """A first token after 20 ms and 2 ms for each other, on a clock of the test."""
    now = [100.0]
    clock = SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(harness, "time", clock)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))

    def answer(prompts: list[list[int]], tokens: int) -> harness.Answered:
        now[0] += 0.02 + 0.002 * (tokens - 1)
        first = 0.02 if tells else None
        return harness.Answered([[7] * tokens for _ in prompts], first)

    loaded = harness.Loaded(answer, lambda: harness.Facts({}, "fake"))
    job = {"vocabulary": 1000, "seed": 1, "tokens": TOKENS}
    ready, *rates = harness.take_turns(job, loaded)
    assert ready == {}
    wanted = {"decode_rate": 1 / 0.002, "prefill_rate": 512 / 0.02}
    assert rates == [pytest.approx(wanted)] * 2
