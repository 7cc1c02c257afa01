"""``inl bench serve``: figures by hand, against our server and a tiny other one."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest

from fake_openai import FakeServer, chunked, event, plain, stream, token, usage
from http_servers import HashServer
from inl.cli import bench_serve
from inl.cli.main import main
from inl.errors import RequestError
from inl.serve import load_client
from inl.serve.load_client import Sample
from inl.serve.load_report import percentiles, report
from waiting import until

DONE = b"data: [DONE]\n\n"


def test_percentiles_are_those_of_the_nearest_rank():
    values = [value / 10 for value in (7, 1, 10, 3, 9, 5, 2, 8, 6, 4)]
    wanted = {"mean": 0.55, "p50": 0.5, "p90": 0.9, "p95": 1.0, "p99": 1.0}
    assert percentiles(values) == pytest.approx(wanted)
    hundred = percentiles(list(range(1, 101)))
    assert [hundred[name] for name in ("p50", "p90", "p95", "p99")] == [50, 90, 95, 99]
    assert percentiles([2.0]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), 2)
    assert percentiles([]) is None


def test_goodput_counts_requests_within_both_bounds():
    samples = [
        Sample(200, "", [0.1, 0.2, 0.3], 0.4, 10, 3),  # 0.1 s between tokens
        Sample(200, "", [0.6, 0.7], 0.8, 10, 2),  # late
        Sample(200, "", [0.1, 0.9], 1.0, 10, 2),  # slow
        Sample(200, "", [0.2], 0.2, 10, 1),  # no second token
        Sample(503, "full", [], 0.1),
        Sample(200, "worker lost", [0.1], 0.1, 10, 1),
    ]
    found = report(samples, 2.0, most_first=0.5, most_inter=0.25)
    assert (found["requests"], found["finished"]) == (6, 4)
    assert found["statuses"] == {"200": 5, "503": 1}
    assert found["requests_per_second"] == 2.0
    assert found["goodput_requests_per_second"] == 1.0
    assert found["output_tokens_per_second"] == 4.0
    assert found["input_tokens_per_second"] == 20.0
    assert found["first_token_seconds"]["mean"] == pytest.approx(0.25)
    assert found["inter_token_seconds"]["p90"] == pytest.approx(0.8)
    assert found["errors"] == ["full", "worker lost"]
    assert report(samples, 2.0)["goodput_requests_per_second"] == 2.0


def measured(capsys, url, **options):
    bench_serve.run(url, as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def test_our_server_is_measured(capsys, tmp_path):
    plot = tmp_path / "load.png"
    with HashServer(seconds=0.002) as server:
        found = measured(
            capsys, server.url, requests=12, tokens="5-9", prompt_words="4-8",
            concurrency=3, plot=plot, first_token_ms=1e9, inter_token_ms=1e9,
        )  # fmt: skip
        generated = server.engine.stats
    assert (found["requests"], found["finished"]) == (12, 12)
    assert found["statuses"] == {"200": 12}
    assert found["errors"] == []
    tokens = found["output_tokens_per_second"] * found["seconds"]
    assert 12 * 5 <= round(tokens) <= 12 * 9
    assert generated.rows >= round(tokens) - 12
    rate = found["goodput_requests_per_second"]
    assert rate == found["requests_per_second"] == 12 / found["seconds"]
    for name in ("first_token", "inter_token", "end_to_end"):
        part = found[f"{name}_seconds"]
        # A client that reads late reads several tokens at the same time.
        assert part["p50"] > 0 or name == "inter_token"
        assert part["p50"] <= part["p90"] <= part["p95"] <= part["p99"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 5000


@pytest.mark.parametrize(
    ("status", "says"), [(401, "--api-key"), (404, "found status 404")]
)
def test_a_server_that_refuses_the_list_of_models(capsys, status, says):
    with FakeServer([], models=plain(status, {"error": "no"})) as server:
        assert main(["bench", "serve", server.url]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_answers_of_one_token_have_no_time_between_tokens(capsys):
    with FakeServer([stream(event(token()), DONE)]) as server:
        bench_serve.run(server.url, requests=1)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("first token")
    assert " p99 " in first
    assert second.startswith("end to end")


ANSWERS = {
    "in odd pieces": (
        chunked(event(token("é")), event(token()), event(usage(4, 2)), DONE), 2, ""),
    "with CRLF": (
        chunked(event(token(), "\r\n"), event(usage(4, 1), "\r\n"),
                b"data: [DONE]\r\n\r\n"), 1, ""),
    "without usage": (stream(event(token()), event(token()), DONE), 2, ""),
    "with comments": (
        stream(b": ping\n\n", b"event: x\n", event(token()), DONE), 1, ""),
    "full": (plain(503, {"error": "full"}), 0, "full"),
    "error in the stream": (
        stream(event(token()), event({"error": {"message": "lost"}}), DONE), 1, "lost"),
    "cut": (chunked(event(token()), event(token()), DONE)[:4], 0, "Error"),
    "ended early": (stream(event(token())), 1, "[DONE]"),
    "no JSON": (stream(b"data: {\n\n"), 0, "JSON"),
    "no HTTP": ([b"hello\r\n\r\n"], 0, "no HTTP"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_other_servers_are_measured(capsys, name):
    answer, tokens, error = ANSWERS[name]
    with FakeServer([answer]) as server:
        found = measured(capsys, server.url, requests=1)
    assert found["finished"] == (not error)
    if error:
        assert error in found["errors"][0]
    else:
        assert round(found["output_tokens_per_second"] * found["seconds"]) == tokens


def test_times_are_those_of_the_events(capsys, monkeypatch):
    """The clock goes on once the client has read all events before."""
    now, read, apply = [0.0], [], load_client._apply

    def record(sample, line, time):
        is_last = apply(sample, line, time)
        read.append(line)
        return is_last

    def later(seconds, *, events):
        def pause():
            until(lambda: sum(map(bool, read)) == events)
            now[0] += seconds

        return pause

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(load_client, "time", clock)
    monkeypatch.setattr(load_client, "_apply", record)
    first, second = (
        stream(later(0.25, events=4 * at), event(token()),
               later(0.5, events=4 * at + 1), event(token()),
               event(usage(1, 2)), later(0.125, events=4 * at + 3), DONE)
        for at in (0, 1)
    )  # fmt: skip
    with FakeServer([first, second]) as server:
        found = measured(
            capsys, server.url, requests=2, concurrency=1, first_token_ms=100
        )
    for name, seconds in (("first_token", 0.25), ("inter_token", 0.5)):
        assert {*found[f"{name}_seconds"].values()} == {seconds}
    assert {*found["end_to_end_seconds"].values()} == {0.875}
    assert found["goodput_requests_per_second"] == 0
    assert found["requests_per_second"] > 0


def test_bodies_have_the_lengths_asked_for(capsys):
    good = chunked(event(token()), DONE)
    with FakeServer([good] * 20) as server:
        measured(
            capsys, server.url, requests=20, prompt_words="3-5", tokens="7-9",
            ignore_eos=False,
        )  # fmt: skip
    words = {len(each["messages"][0]["content"].split()) for each in server.bodies}
    assert words == {3, 4, 5}
    assert {each["max_tokens"] for each in server.bodies} == {7, 8, 9}
    assert {each["model"] for each in server.bodies} == {"fake"}
    assert not any("ignore_eos" in each for each in server.bodies)


def test_a_trace_gives_arrivals_and_lengths(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": 0.5 * at, "prompt_words": 2 + at, "tokens": 5} for at in (0, 1)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer([chunked(event(token()), DONE)] * 2) as server:
        began = time.monotonic()
        found = measured(capsys, server.url, trace=trace)
    assert found["requests"] == 2
    assert server.times[1] - began >= 0.5
    assert [len(b["messages"][0]["content"].split()) for b in server.bodies] == [2, 3]
    trace.write_text("{}\n")
    with pytest.raises(RequestError, match="line 1"):
        measured(capsys, "http://127.0.0.1:9", trace=trace)


def test_arrivals_are_poisson_in_bursts():
    import random

    rows = bench_serve._rows(random.Random(1), 6000, 10.0, 3, "1", "1")
    times = [arrival for arrival, _, _ in rows]
    assert all(len({*times[at : at + 3]}) == 1 for at in range(0, 6000, 3))
    gaps = [later - now for now, later in zip(times[::3], times[3::3], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.3, rel=0.1)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.1), "as of an exponential distribution"


def test_a_server_that_is_not_there_is_named(capsys):
    with pytest.raises(RequestError, match="start a server there"):
        measured(capsys, "http://127.0.0.1:9")
