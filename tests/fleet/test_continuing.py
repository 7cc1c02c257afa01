"""Streams go on token for token when engines are killed, stopped or cut off."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fleets import EngineProcess, Fleet
from http_servers import HashServer
from stream_requests import LONG, QUICK, REQUESTS, TEXT, joined, without_names
from waiting import until


@pytest.fixture(scope="module")
def plain():
    """The engine's own server, whose answers are the right ones."""
    with HashServer(max_batch=8) as server:
        yield server


@pytest.fixture
def engines():
    options = {"max_batch": 8, "seconds": 0.01}
    with EngineProcess(**options) as one, EngineProcess(**options) as two:
        yield [one, two]


def undisturbed(plain, path, body):
    status, _, text = plain.send("POST", path, {**body, "stream": True})
    assert status == 200, text
    return text.decode().splitlines()


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
        for name in REQUESTS
    ],
)
def test_a_stream_of_a_killed_engine_goes_on_as_if_nothing_had_happened(
    name, plain, engines
):
    path, body = REQUESTS[name]
    if path == TEXT:
        body = {**body, "stream_options": {"include_usage": True}}
    wanted = joined(undisturbed(plain, path, body))
    with Fleet([each.address for each in engines]) as fleet:
        until(lambda: fleet.send("GET", "/load")[2]["replicas"][1]["state"] == "ready")

        def kill():
            fleet.engine_of(engines).kill()

        lines = fleet.disturbed(engines, path, body, kill)
        assert joined(lines) == wanted
        assert fleet.counts["continued"] >= 1
        assert not fleet.counts["diverged"]
        until(lambda: not fleet.client.admission.open)


def test_log_probabilities_of_a_prompt_come_once_from_the_engine_that_answers(
    plain, engines
):
    path, body = TEXT, {"prompt": list(range(90)), "prompt_logprobs": 1, "n": 2}
    body |= {"logprobs": 1, "seed": 11, **LONG}
    wanted = plain.send("POST", path, body)[2]
    with (
        Fleet([each.address for each in engines]) as fleet,
        ThreadPoolExecutor(1) as pool,
    ):
        until(lambda: fleet.send("GET", "/load")[2]["replicas"][1]["state"] == "ready")
        for each in engines:
            each.hold()
        asked = pool.submit(fleet.send, "POST", path, body)
        fleet.until_begun()
        fleet.engine_of(engines).kill()
        for each in engines:
            each.release()
        status, _, found = asked.result()
        assert status == 200
        assert without_names(found) == without_names(wanted)
        assert fleet.counts["continued"] == 2


def test_a_stop_string_may_lie_across_the_loss_of_an_engine(plain, engines):
    body = {"prompt": [5, 6, 7], "seed": 12, **LONG}
    text = plain.send("POST", TEXT, body)[2]["choices"][0]["text"]
    body["stop"] = [text[-160:-120]]
    wanted = joined(undisturbed(plain, TEXT, body))
    with Fleet([each.address for each in engines]) as fleet:
        until(lambda: fleet.send("GET", "/load")[2]["replicas"][1]["state"] == "ready")

        def kill():
            fleet.engine_of(engines).kill()

        lines = fleet.disturbed(engines, TEXT, body, kill)
        assert joined(lines) == wanted
        assert fleet.counts["continued"] == 1
