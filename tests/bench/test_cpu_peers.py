"""The parts of the benchmark against the peers that need no peer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import cpu_peers
import cpu_quality
import harness
import pytest
from peers import report, requantize
from peers.catalog import PEERS, Row, Unknown, inl_rows, select
from peers.commands import Failed, parse_line, run_logged
from peers.environments import portable_flags
from peers.instructions import build_options, check_rows
from peers.models import Models
from peers.report import COLUMNS, Result, Spread

from waiting import is_running, until

DECODE = next(column for column in COLUMNS if column.key == "decode_rate")
READY = next(column for column in COLUMNS if column.key == "ready_seconds")
FACTS = {"question": "?", "answer": [5, 6, 7, 8], "likeliest": [5, 9]}


def result(peer: str, decodes: list[float], **more: object) -> Result:
    rounds = [
        {"decode_rate": rate, "ready_seconds": rate, "said": [5, 6], **more}
        for rate in decodes
    ]
    return Result(Row(peer, peer, "mode", "source"), rounds)


def test_a_spread_is_median_least_and_most() -> None:
    assert Spread.of([3, 1, 50]) == (3, 1, 50)
    assert Spread.of([2, 4]) == (3, 2, 4)


def test_the_best_peer_is_by_median_and_never_inl() -> None:
    steady, lucky = result("a", [10, 11, 12]), result("b", [1, 2, 99])
    ours = result("inl", [500])
    assert report.best_peer([ours, steady, lucky], DECODE) is steady
    assert report.best_peer([ours, steady, lucky], READY) is lucky
    assert report.best_peer([ours], DECODE) is None


def test_ratios_above_one_are_ahead_in_both_directions() -> None:
    assert report.ratio(200, 100, DECODE) == 2
    assert report.ratio(0.5, 1.0, READY) == 2
    found = report.ratios([result("inl", [30]), result("a", [10])])
    assert {line["column"]: line["ratio"] for line in found} == {
        "decode": 3,
        "ready s": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(
    ("said", "agrees", "sensible"),
    [
        ([5, 6, 7, 8], 4, True),
        ([5, 6, 1, 8], 2, True),
        ([9, 6, 7, 8], 0, True),
        ([4, 6, 7, 8], 0, False),
        ([5, 5, 5, 5], 1, False),
    ],
)
def test_a_broken_peer_cannot_win(said: list[int], agrees: int, sensible: bool) -> None:
    one, other = result("a", [99], said=said), result("b", [1])
    report.judge(one, FACTS)
    assert (one.agrees, one.sensible) == (agrees, sensible)
    assert report.best_peer([one, other], DECODE) is (one if sensible else other)


def test_a_peer_that_failed_in_one_round_cannot_win() -> None:
    one, other = result("a", [99]), result("b", [1])
    one.failures.append("round 2: exit code 1")
    assert report.best_peer([one, other], DECODE) is other


def test_the_share_is_bytes_times_rate_over_bandwidth() -> None:
    one = result("a", [50])
    assert one.share(10_000) is None
    one.weight_bytes = 100
    assert one.share(10_000) == 0.5
    assert one.share(None) is None


def test_the_table_has_a_line_for_a_peer_that_could_not_be_installed() -> None:
    gone = Result(Row("b", "gone", "mode", "source"), failures=["no wheel"])
    lines = report.table([result("inl", [3]), result("a", [1, 2]), gone], None)
    head, _, ours, peer, last = lines.splitlines()
    assert head.count("|") == ours.count("|") == len(COLUMNS) + 3
    assert "**" not in ours
    assert "| **2 (1 to 2)** |" in peer
    assert last == "| gone | not run: no wheel |"


def test_rows_are_selected_by_peer_and_by_mode() -> None:
    keys = [row.key for row in select("openvino:int8, llama.cpp")]
    assert keys[0] == "openvino:int8"
    assert keys[1:] == [row.key for row in PEERS[0].rows]
    assert select("none") == []
    assert len(select("all")) == sum(len(peer.rows) for peer in PEERS)
    assert "vllm" not in {row.peer for row in select(None)}
    with pytest.raises(Unknown, match=r"'olama', accepted: all, none, llama\.cpp"):
        select("olama")
    with pytest.raises(Unknown, match="--inl-dtypes"):
        inl_rows(" , ")


def test_every_row_has_a_key_of_its_own_and_a_driver() -> None:
    rows = select("all")
    assert len({row.key for row in rows}) == len(rows)
    drivers = Path(cpu_peers.DRIVERS)
    assert all((drivers / peer.driver).is_file() for peer in PEERS)


@pytest.mark.parametrize("out", ["", "hello\n", '{"a": 1}\nbye', "[1]"])
def test_a_driver_that_prints_no_object_is_a_failure(out: str) -> None:
    with pytest.raises(Failed, match="the driver printed"):
        parse_line(out)


def test_the_last_line_counts() -> None:
    assert parse_line('noise\n{"a": 1}\n') == {"a": 1}


def test_a_program_past_its_limit_ends_with_its_children(tmp_path: Path) -> None:
    pids, limit = tmp_path / "pids", 1
    child = "import time; time.sleep(600)"
    code = f"import pathlib,subprocess,sys;a=[sys.executable,'-c',{child!r}];"
    code += "b=subprocess.Popen(a);"
    code += f"pathlib.Path({str(pids)!r}).write_text(str(b.pid));b.wait()"
    while not pids.exists() or not pids.read_text():
        # A busy machine may not start the child in the first limit.
        with pytest.raises(Failed, match=f"took more than {limit} s"):
            run_logged([sys.executable, "-c", code], tmp_path / "log", limit=limit)
        limit *= 2
    until(lambda: not is_running(int(pids.read_text())))


def test_a_failure_tells_the_line_of_the_error(tmp_path: Path) -> None:
    code = "import sys;sys.exit('ERROR: no wheel\\nhint: see above')"
    with pytest.raises(Failed, match="exit code 1: ERROR: no wheel"):
        run_logged([sys.executable, "-c", code], tmp_path / "log", limit=60)


def test_a_missing_model_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"gone\.gguf: No such file"):
        Models.of(tmp_path / "gone.gguf", tmp_path, Path(sys.executable))


def test_portable_flags_leave_out_what_machines_only_claim() -> None:
    flags = portable_flags("flags : avx avx2 fma avx512f amx_tile avx512_fp16")
    assert flags == [
        "-DGGML_NATIVE=OFF",
        *["-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_AVX512=ON"],
    ]


def test_prompts_are_never_the_same_and_repeat_with_their_seed() -> None:
    prompts, again = harness.Prompts(1000, seed=3), harness.Prompts(1000, seed=3)
    first, second = prompts.take(2, 32), prompts.take(2, 32)
    assert again.take(2, 32) == first != second
    assert all(256 <= token < 1000 for row in first + second for token in row)


def test_a_short_answer_is_not_taken_for_a_fast_one() -> None:
    harness.check(harness.Answered([[1, 2]]), 1, 2)
    for ids in ([[1]], [[1, 2], [1, 2]], []):
        with pytest.raises(RuntimeError, match="asked: 1 of 2"):
            harness.check(harness.Answered(ids), 1, 2)


def test_measuring_a_peer_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms a call and 2 ms for each token after the first, on a clock of the test."""
    now = [100.0]
    clock = SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(harness, "time", clock)

    def answer(prompts: list[list[int]], tokens: int) -> harness.Answered:
        now[0] += 0.02 + 0.002 * (tokens - 1)
        return harness.Answered([[7] * tokens for _ in prompts], 0.02)

    job = {
        "vocabulary": 1000,
        "seed": 1,
        "started": 99.0,
        "question": [1],
        "question_tokens": 3,
        "only_start": False,
        **cpu_peers.QUICK,
        "batches": [8, 32],
        "batch_tokens": 16,
    }
    asked = 0

    def facts() -> harness.Facts:
        nonlocal asked
        asked += 1
        return harness.Facts({"fake": "1"}, "fake", 7)

    loaded = harness.Loaded(answer, facts)
    start = harness.measure(job | {"only_start": True}, loaded)
    assert start == {"ready_seconds": pytest.approx(1.02)}
    assert not asked  # a start does not include what only a report needs
    measured = harness.measure(job, loaded)
    assert measured["weight_bytes"] == 7
    assert measured["said"] == [7, 7, 7]
    assert measured["first_token_ms"] == pytest.approx(20)
    assert measured["prefill_rate"] == pytest.approx(512 / 0.02)
    assert measured["decode_rate"] == pytest.approx(1 / 0.002)
    assert measured["c8_rate"] == pytest.approx(8 * 16 / 0.05)
    assert measured["c32_rate"] == pytest.approx(32 * 16 / 0.05)
    assert 0 < measured["alone_mb"] <= measured["peak_mb"]
    serial = harness.measure(job, loaded._replace(is_serial=True))
    assert serial["c32_rate"] == serial["c8_rate"] == pytest.approx(8 * 16 / 0.05)


def test_instruction_sets_are_forced_for_engines_that_can_be_held_to_them() -> None:
    avx2 = build_options("avx2")
    assert "-DGGML_NATIVE=OFF" in avx2
    assert "-DGGML_AVX2=ON" in avx2
    assert not any("AVX512" in option for option in avx2)
    assert set(avx2) < set(build_options("avx512"))
    check_rows("avx2", [*inl_rows("auto"), *select("llama.cpp:source,ik_llama.cpp")])
    check_rows(None, select("openvino"))
    with pytest.raises(Unknown, match=r"--isa avx2: found openvino among the rows"):
        check_rows("avx2", select("llama.cpp,openvino:int8"))
    with pytest.raises(Unknown, match=r"found ik_llama\.cpp"):
        check_rows("avx512", select("ik_llama.cpp"))


def options(**given: object) -> SimpleNamespace:
    return SimpleNamespace(
        **{"model": [None], "requantize": [], "cache": Path("cache")} | given
    )


def test_each_model_is_followed_by_its_other_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lambda model, kind, cache: cache / f"{model.stem}-{kind}.gguf"  # noqa: E731
    monkeypatch.setattr(cpu_peers, "requantized", made)
    models = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    given = options(model=models, requantize=["Q8_0", "Q5_K_M"], cache=tmp_path)
    names = [path.name for path in cpu_peers.models_of(given)]
    assert names == [
        "a.gguf", "a-Q8_0.gguf", "a-Q5_K_M.gguf",
        "b.gguf", "b-Q8_0.gguf", "b-Q5_K_M.gguf",
    ]  # fmt: skip
    assert list(cpu_peers.models_of(options())) == [None]
    with pytest.raises(Failed, match="--requantize: found no --model"):
        list(cpu_peers.models_of(options(requantize=["Q8_0"])))


def test_a_file_is_quantized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"weights")
    commands = []

    def run(command: list[object], log: Path, *, limit: float) -> str:
        commands.append(command)
        if command[1] == "-c":
            return "quantizer\n"
        Path(str(command[3])).write_bytes(b"other")
        return ""

    monkeypatch.setattr(requantize, "environment", lambda *_: Path("python"))
    monkeypatch.setattr(requantize, "run_logged", run)
    made = requantize.requantized(source, "Q5_K_M", tmp_path / "cache")
    assert made.read_bytes() == b"other"
    assert made.name == "m-Q5_K_M.gguf"
    assert commands[-1][:3] == ["quantizer", "--allow-requantize", source]
    count = len(commands)
    assert requantize.requantized(source, "Q5_K_M", tmp_path / "cache") == made
    assert len(commands) == count
    source.write_bytes(b"others")
    assert requantize.requantized(source, "Q5_K_M", tmp_path / "cache") != made


def test_texts_of_the_quality_benchmark_are_in_the_tree() -> None:
    missing = [path for path in cpu_quality.TEXTS if not path.is_file()]
    assert not missing


def test_a_start_is_the_median_of_those_with_files_in_the_cache() -> None:
    bench = object.__new__(cpu_peers.Bench)
    bench.sizes = cpu_peers.QUICK
    seconds = iter([9.0, 3.0, 5.0, 4.0])
    whole = []

    def run(row: Row, sizes: dict[str, object], seed: int) -> dict[str, object]:
        if not sizes.get("only_start"):
            whole.append(seed)
        return {"ready_seconds": next(seconds), "decode_rate": 7}

    bench.run = run
    found = bench.run_once(Row("inl", "inl", "auto", "source"), seed=2)
    assert found == {"ready_seconds": 4, "decode_rate": 7}
    assert whole == [2]


def test_rounds_that_are_ended_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    bench = object.__new__(cpu_peers.Bench)
    bench.rounds, bench.sizes, bench.has_ended = 3, {}, False
    bench.bandwidths = [1e9]
    bench.measure_bandwidth = lambda: None
    runs = iter([1.0, 2.0, 3.0])

    bench.rest = 0

    def run(row: Row, sizes: dict[str, object], seed: int) -> dict[str, object]:
        if sizes.get("only_start"):
            return {"ready_seconds": 0}
        for rate in runs:
            return {"decode_rate": rate, "weight_bytes": 0, "ready_seconds": 0}
        raise KeyboardInterrupt

    bench.run = run
    rows = [Row(name, name, "mode", "source") for name in ("inl", "a")]
    results = [Result(row) for row in rows]
    bench.play(results)
    assert bench.has_ended
    assert bench.rounds == 1
    assert sorted(len(each.rounds) for each in results) == [1, 2]
    assert "ended" in capsys.readouterr().err
    assert "2 (1 to 3)" in report.table(results, 1e9)
    bench.run = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    late = Result(rows[0])
    bench.play([late])
    assert late.failures == ["ended before its first round"]
