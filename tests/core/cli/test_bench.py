"""``inl bench`` and its measurements."""

from __future__ import annotations

import importlib.util
import json

import pytest

from inl import EngineConfig, InferenceEngine
from inl.backend.bandwidth import Bandwidth, host_bandwidth, memory_bandwidth
from inl.cli import bench_show
from inl.cli.bench import parse_batches, peak_bytes
from inl.cli.bench_mix import measure
from inl.cli.bench_show import save_plot, show
from inl.cli.main import main
from inl.engine.benchmark import (
    Spread,
    StepClock,
    measure_repeated,
    measure_speed,
    traffic,
)
from inl.engine.core import StepRecord
from inl.engine.traffic_loads import LOADS, Arrival, Draw, serve
from inl.errors import RequestError
from inl.install_command import install_command
from inl.spec.step import Bucket

SHORT = ("--prompt-tokens", "12", "--tokens", "5", "--runs", "2", "--batch", "2,1")


@pytest.fixture(scope="module")
def engine(tiny_folder):
    clock = StepClock()
    config = EngineConfig("reference", max_batch=2, prefix_cache=False, context=64)
    with InferenceEngine.from_pretrained(
        tiny_folder, config, on_step=clock.on_step
    ) as engine:
        yield engine, clock


@pytest.mark.full
def test_report_as_json(inl, tiny_folder):
    fixed = ("--model", str(tiny_folder), "--device", "reference", "--json")
    done = inl("bench", *fixed, *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["device"], report["model"]) == ("reference:0", "tiny-chat")
    assert report["load_seconds"] > 0
    assert report["peak_host_bytes"] > 10 << 20
    assert report["bandwidth"]["bytes_per_second"] > 1e8
    assert [row["batch"] for row in report["batches"]] == [1, 2]
    for row in report["batches"]:
        first, prefill = row["first_token_seconds"], row["prefill_tokens_per_second"]
        assert first["least"] <= first["median"] <= first["most"]
        assert prefill["most"] == pytest.approx(row["batch"] * 12 / first["least"])
        decode = row["decode_tokens_per_second"]["median"]
        assert row["bytes_per_second"] == pytest.approx(row["bytes_per_token"] * decode)
        share = row["bytes_per_second"] / report["bandwidth"]["bytes_per_second"]
        assert row["share_of_bandwidth"] == pytest.approx(share)


def test_report_as_text(inl, tiny_folder):
    fixed = ("--model", str(tiny_folder), "--device", "reference")
    shown = inl("bench", *fixed, *SHORT).stdout
    for word in ("load ", "peak memory", "first token", "prefill", "decode", "moved"):
        assert word in shown
    assert "prefill, batch 2" in shown
    assert "█" in shown


def test_bytes_per_step_equal_the_sizes_of_the_tensors_read(engine):
    """Compared with sizes computed by hand from the config."""
    found = traffic(engine[0].runner)
    hidden, inner, vocab, layers = 48, 96, 258, 2
    layer = hidden * (64 + 16 + 16 + 64) + 3 * hidden * inner + 2 * hidden
    head = vocab * hidden
    assert found.weights == 4 * (head + hidden + layers * layer)
    assert found.cache_per_token == layers * 2 * 2 * 8 * 4
    assert found.step(3, 10.0) == found.weights + 30 * found.cache_per_token


def test_throughput_counts_full_steps_only(engine):
    ticks = []
    speed = measure_speed(
        *engine,
        batch=2,
        prompt_tokens=9,
        tokens=6,
        runs=3,
        tick=lambda: ticks.append(1),
    )
    assert len(ticks) == 4  # one to warm up
    assert speed.batch == 2
    assert speed.decode is not None
    assert 0 < speed.decode.least <= speed.decode.median <= speed.decode.most


def test_one_token_gives_no_decode_throughput(engine):
    speed = measure_speed(*engine, batch=1, prompt_tokens=9, tokens=1, runs=1)
    assert speed.decode is None
    assert speed.prefill.median == pytest.approx(9 / speed.first_token_seconds.median)


def test_tokens_beyond_the_context_are_refused(engine):
    with pytest.raises(RequestError, match="60 \\+ 6 tokens, the context holds 64"):
        measure_speed(*engine, batch=1, prompt_tokens=60, tokens=6, runs=1)


def test_the_clock_counts_full_decoding_steps_only(monkeypatch):
    now = iter([10.0, 10.5, 11.0, 12.0])
    monkeypatch.setattr("inl.engine.benchmark.time.perf_counter", lambda: next(now))
    clock = StepClock()
    clock.begin(3)
    for rows, decoding in ((3, 2), (3, 3), (2, 2), (3, 3), (3, 0), (3, 3)):
        bucket = Bucket(rows, rows)
        clock.on_step(StepRecord(1, bucket, rows, rows, decoding, (1, 2, 3)))
    assert clock.tokens_per_second() == pytest.approx(3 * 2 / 1.0)
    clock.begin(3)
    assert clock.tokens_per_second() is None


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_memory_of_the_host_is_measured():
    small = host_bandwidth(8 << 20)
    assert small.bytes_per_second > 1e8
    assert small.how.startswith("NumPy ")


class Offers:
    """A fake backend with a device type and one capability."""

    def __init__(self, kind, offered=None):
        from inl.device import Device

        self.device, self.offered = Device(kind), offered

    def offers(self, kind):
        return self.offered if kind is Bandwidth else None


class Fixed(Bandwidth):
    def bytes_per_second(self):
        return 5e12


def test_bandwidth_is_none_for_a_device_backend_without_the_capability():
    assert memory_bandwidth(Offers("npu")) is None
    found = memory_bandwidth(Offers("npu", Fixed()))
    assert found == (5e12, "measured by npu:0")


@pytest.mark.parametrize("text", ["", "1,", "0", "1;8", "-1", "5000", "²"])
def test_invalid_batches_are_refused(text):
    with pytest.raises(RequestError, match="batch: found"):
        parse_batches(text)


def test_batches_are_sorted_and_once_each():
    assert parse_batches("8, 1,8") == [1, 8]


def test_peak_memory_is_at_least_the_current_memory():
    held = bytearray(64 << 20)
    assert peak_bytes() > len(held)


REPORT = {
    "model": "tiny",
    "device": "npu:0",
    "prompt_tokens": 4,
    "tokens": 1,
    "runs": 1,
    "load_seconds": 0.5,
    "peak_host_bytes": None,
    "device_memory": {"total": 8 << 30, "free": 6 << 30},
    "bandwidth": None,
    "repeated": None,
    "batches": [
        {
            "batch": 1,
            "first_token_seconds": {"median": 1.0, "least": 1.0, "most": 1.0},
            "prefill_tokens_per_second": {"median": 4.0, "least": 4.0, "most": 4.0},
            "decode_tokens_per_second": None,
            "bytes_per_token": None,
            "bytes_per_second": None,
            "share_of_bandwidth": None,
        }
    ],
}


def test_hits_of_tiers_are_measured(tiny_folder):
    config = EngineConfig(
        "reference", max_batch=2, context=64, cache_bytes=1 << 14, kv_host="64MiB"
    )
    with InferenceEngine.from_pretrained(tiny_folder, config) as engine:
        clock = StepClock()
        options = {"batch": 2, "prompt_tokens": 40}
        measure_speed(engine, clock, tokens=2, runs=4, **options)
        found = measure_repeated(engine, **options)
    assert found.hits["host"] > 0
    assert found.cached_tokens == 2 * 32
    shown = show({**REPORT, "repeated": found._asdict()})
    assert f"64 tokens cached, {found.hits['host']} blocks from host" in shown


def test_missing_measurements_are_reported():
    shown = show(REPORT)
    assert "device memory  2.0 GiB of 8.0 GiB in use" in shown
    assert "device memory" not in show({**REPORT, "device_memory": None})
    assert "bandwidth      not measured on this device" in shown
    assert "decode       not measured: fewer than two full steps" in shown
    assert "moved" not in shown


NO_PLOT = importlib.util.find_spec("matplotlib") is None


def test_plot_without_matplotlib_prints_the_install_command(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(bench_show, "find_spec", lambda _: None)
    assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
    line = f"inl: --plot needs matplotlib; try: {install_command('inl-core[plot]')}\n"
    assert capsys.readouterr().err == line


@pytest.mark.full
@pytest.mark.skipif(NO_PLOT, reason="matplotlib is not installed")
def test_plot_writes_an_image(tmp_path):
    save_plot(REPORT, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.full
@pytest.mark.skipif(NO_PLOT, reason="matplotlib is not installed")
@pytest.mark.parametrize("name", ["x.txt", "no/x.png"])
def test_an_invalid_plot_path_fails_before_measuring(inl, tmp_path, name):
    done = inl("bench", "--plot", str(tmp_path / name))
    assert done.returncode == 2
    assert "plot: found" in done.stderr


def test_requests_are_served_as_they_arrive(engine):
    arrivals = [
        Arrival([1, 2, 3], 4),
        Arrival([4, 5], 6, 0.8, seconds=0.2),
        Arrival([6], 2, seconds=0.1),
    ]
    ticks = []
    found = serve(engine[0], arrivals, lambda: ticks.append(1))
    assert (found.requests, found.tokens, len(ticks)) == (3, 12, 3)
    assert found.seconds > 0.2
    assert found.rate == pytest.approx(12 / found.seconds)
    assert found.first == sorted(found.first)
    assert 0 < found.first_token(0.5) <= found.first_token(0.99) == found.first[-1]


def test_loads_are_the_same_for_a_seed_and_scaled():
    for _, make in LOADS.values():
        first, again, other = (make(Draw(99, 0.01, seed)) for seed in (1, 1, 2))
        assert first == again != other
        assert len(make(Draw(99, 0.1, 1))) >= len(first) >= 1
        assert all(0 <= token < 99 for each in first for token in each.prompt)


def test_a_mix_of_loads(engine):
    found = measure(engine[0], ["first-32", "mixed"], scale=0.1, runs=2, seed=0)
    (row,), (skipped,) = found["loads"], found["skipped"]
    assert (row["load"], row["requests"]) == ("first-32", 1)
    least, most = row["least_tokens_per_second"], row["most_tokens_per_second"]
    assert 0 < least <= row["tokens_per_second"] <= most
    assert 0 < row["first_token_seconds"]["p50"] <= 1 / least
    assert skipped["load"] == "mixed"
    assert skipped["tokens"] > skipped["context"] == 64
    assert found["max_batch"] == 2


def test_the_command_mix(inl, tiny_folder, tmp_path):
    fixed = ("--model", str(tiny_folder), "--device", "reference", "--runs", "1")
    done = inl("bench", "mix", *fixed, "--loads", "first-32,long", "--max-batch", "2")
    assert done.returncode == 0, done.stderr
    assert "first-32" in done.stdout
    assert "long: not run, " in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loads", "first-32,slow"], "found 'slow', accepts all, or of first-32"),
        (["--scale", "0"], "found 0.0, accepts numbers above 0"),
    ],
)
def test_a_mix_refuses(capsys, words, said):
    assert main(["bench", "mix", "--device", "reference", *words])
    assert said in " ".join(capsys.readouterr().err.split())
