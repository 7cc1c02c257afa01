"""``/ready`` says what the next request finds, whatever has failed before it."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from types import SimpleNamespace

import pytest

from depth import SEED, scaled
from failures import KINDS, FaultyServer, patched, raises, runner_faults
from http_servers import HashServer
from inl.engine import step_loop
from inl.errors import CheckpointError, WorkerLost
from inl.serve import health, model_slot
from inl.serve.api_error import ApiError
from inl.serve.frontends.messages import ModelSettings, Trouble
from inl.serve.frontends.processes import FrontEnd
from inl.serve.frontends.remote import RemoteModel
from inl.serve.health import Health
from inl.serve.job import Job
from inl.serve.metrics import Metrics
from inl.serve.model_slot import ModelSource
from inl.serve.models import Models
from inl.serve.served_model import ServedModel
from inl.serve.settings import ServerConfig
from waiting import until

PATH = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 4,
    "ignore_eos": True,
}

FULL = Path("/dev/full")

STALL_SECONDS = 0.5
"""Of failures that end no step."""

PATIENCE_SECONDS = 0.3
"""Time after which a request counts as queued where the server is not ready."""


@pytest.fixture(autouse=True)
def times(monkeypatch):
    """Pauses are short; what a busy machine delays is waited for."""
    monkeypatch.setattr(model_slot, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(model_slot, "RELOAD_SECONDS", 1.0)
    monkeypatch.setattr(health, "MOST_SECONDS", 0.2)
    # So that requests need a thread that starts.
    monkeypatch.setattr(step_loop, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(health, "VERDICT_SECONDS", 2 * health.TEST_SECONDS)


def ready(server):
    status, _, body = server.send("GET", "/ready")
    assert status in (200, 503)
    assert (body["status"] == "ready") == (status == 200)
    assert server.send("GET", "/health")[0] == 200
    return status == 200, body.get("reason")


def begin(server):
    """Send a request; its future is one of ``server.asked``, too."""
    server.asked.append(server.begin("POST", PATH, BODY))
    return server.asked[-1]


def check(server):
    """Compare ``/ready`` with the next request; return both, and the reason."""
    is_ready, reason = ready(server)
    request = begin(server)
    try:
        status = request.result(300 if is_ready else PATIENCE_SECONDS)[0]
    except Late:
        status = None  # queued
    if is_ready:
        assert status == 200
    else:
        assert reason
    return is_ready, status, reason


def fail(server):
    """Send some requests; return the last one's future."""
    return [begin(server) for _ in range(3)][-1]


@pytest.mark.parametrize("kind", KINDS)
def test_ready_says_what_the_next_request_finds(kind, monkeypatch):
    with FaultyServer() as server:
        assert check(server)[:2] == (True, 200)
        with KINDS[kind](server), monkeypatch.context() as patch:
            if "hangs" in kind or "held" in kind:
                patch.setattr(model_slot, "STALL_SECONDS", STALL_SECONDS)
            first = fail(server)
            # Or it waits for the end of the failure, which has been noticed.
            until(lambda: first.done() or not ready(server)[0])
            found = [check(server) for _ in range(3)]
            if any(each in kind for each in ("always", "hangs", "held", "for ever")):
                assert not any(is_ready for is_ready, _, _ in found), found
                assert not any(status == 200 for _, status, _ in found), found
        until(lambda: all(each.done() for each in server.asked))
        until(lambda: ready(server)[0])
        assert check(server)[:2] == (True, 200)


@pytest.mark.long
def test_a_long_run_of_failures(monkeypatch):
    draw = random.Random(SEED)
    with FaultyServer() as server:
        for _ in range(scaled(10, 40, 200)):
            kind = draw.choice(sorted(KINDS))
            with KINDS[kind](server), monkeypatch.context() as patch:
                patch.setattr(model_slot, "STALL_SECONDS", STALL_SECONDS)
                for _ in range(draw.randrange(1, 4)):
                    check(server)
            until(lambda: all(each.done() for each in server.asked))
            until(lambda: ready(server)[0])
            assert check(server)[:2] == (True, 200), kind


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_trace_and_no_request(tmp_path):
    with FaultyServer(trace=tmp_path / "trace") as server:
        recorder = server.engine.recorder
        recorder._file.close()
        recorder._file = FULL.open("wb", buffering=0)
        assert check(server)[:2] == (True, 200)
        assert recorder._file is None
        assert check(server)[:2] == (True, 200)


def test_a_front_end_tells_of_texts_that_it_cannot_encode():
    class Text:
        fails = True

        def encode_all(self, prompts):
            raise OSError("no tables")

        def encode_test(self):
            if self.fails:
                raise OSError("no tables")

    async def main():
        sent, text = [], Text()
        client = SimpleNamespace(send=sent.append)
        model = RemoteModel(ModelSettings("m", (), None, None), client)
        model._text = text
        job = Job("m", ["a"], {})
        with pytest.raises(OSError, match="no tables"):
            async with model.generate(job, "client"):
                """It is not submitted."""
        assert sent == [Trouble("m", "a request failed: OSError")]
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        assert sent[-1] == Trouble("m", "a test request failed: OSError")
        text.fails = False
        while len(sent) < 3:
            await asyncio.sleep(0.01)
        assert sent[-1] == Trouble("m", None)

    asyncio.run(main())


def test_failed_steps_are_counted():
    with FaultyServer() as server:
        errors = [OSError("the cable is out")] * 2
        with runner_faults(server, collect=errors):
            fail(server).result()
            until(lambda: not errors)  # the last ones may be of tests
        until(lambda: ready(server)[0])
        text = server.send("GET", "/metrics")[2].decode()
        line = 'inl:failed_steps_total{engine="0",model_name="hash"} 2.0'
        assert line in text
        assert server.loads == 1


def test_a_lost_engine_is_loaded_again_some_times_only(caplog, monkeypatch):
    monkeypatch.setattr(model_slot, "RELOAD_SECONDS", 600.0)
    with FaultyServer() as server:
        with runner_faults(server, collect=WorkerLost("killed")):
            fail(server).result()
            until(lambda: server.loads == 1 + model_slot.MOST_RELOADS)
            for _ in range(3):
                fail(server).result()
            status, _, body = server.send("POST", PATH, BODY)
            assert status == 503
            assert body["error"]["code"] == "model_load_failed"
            assert not ready(server)[0]
        assert server.loads == 1 + model_slot.MOST_RELOADS
        assert "its engine was lost 3 times within 600 s" in caplog.text
        server.server.models.default._reloads.clear()
        until(lambda: ready(server)[0])
        assert check(server)[:2] == (True, 200)


def test_a_client_whose_requests_fail_does_not_make_the_server_unready():
    """Each of them is followed by a test, whose verdict the answer waits for."""
    poison = {**BODY, "model": "hash", "seed": 7}
    with FaultyServer(max_queue=64) as server:

        def bad(options, *_):
            if options.get("seed") == 7:
                raise KeyError("a mistake of this server")

        model = server.server.models.default._model
        before = model._submit

        def submit(options, *rest):
            bad(options)
            return before(options, *rest)

        model._submit = submit
        end = threading.Event()

        def ask():
            while not end.is_set():
                assert server.send("POST", PATH, poison)[0] == 500

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        found = [check(server)[:2] for _ in range(10)]
        end.set()
        for thread in threads:
            thread.join()
        assert found == [(True, 200)] * 10


def test_a_process_that_does_not_start_is_the_servers_fault():
    error = CheckpointError("template: cannot start")
    assert health.is_server_fault(error)
    with FaultyServer() as server:
        import inl.text.template as template

        slot = server.server.models.default
        slot.engine.chat_template.close()
        refuse = raises(OSError(11, "Resource temporarily unavailable"))
        with patched(template, "BoundedChild", refuse):
            status, _, body = server.send("POST", PATH, BODY)
            assert (status, body["error"]["code"]) == (503, "process_failed")
            assert not ready(server)[0]
            ids = {"prompt": [1, 2], "max_tokens": 2}
            assert server.send("POST", "/v1/completions", ids)[0] == 200
        until(lambda: ready(server)[0])


def test_one_of_several_models_suffices_unless_it_is_named():
    async def check_models():
        def broken(_):
            raise OSError("no such disk")

        sources = [ModelSource(name, broken) for name in ("a", "b")]
        metrics = Metrics(vllm_names=False)
        models = Models(sources, ServerConfig(port=0), metrics, max_batch=4)
        first, second = models
        with pytest.raises(ApiError):
            async with first.lease():
                """It does not load."""
        found = await first.problem(), await second.problem()
        for slot in models:
            slot._health.forget()
        await asyncio.sleep(0)
        models.close()
        return found

    problem, none = asyncio.run(check_models())
    assert none is None
    assert "'a' could not be loaded: its files cannot be read" in problem


def test_ready_names_a_model():
    with HashServer() as server:
        assert server.send("GET", "/ready?model=hash")[0] == 200
        assert server.send("GET", "/ready?model=none")[0] == 404


@pytest.mark.full
def test_a_front_end_that_ended_is_not_ready_until_another_one_is(monkeypatch):
    with HashServer(frontends=2) as server:
        assert ready(server)[0]
        processes = server.server.frontends.processes
        run, go = FrontEnd._run_once, threading.Event()

        async def run_later(process):
            await asyncio.to_thread(go.wait, 300)
            return await run(process)

        monkeypatch.setattr(FrontEnd, "_run_once", run_later)
        processes[0].kill()
        until(lambda: server.server.frontends.problem() is not None)
        assert server.server.frontends.problem() == "a front-end is being started"
        go.set()
        until(lambda: server.server.frontends.problem() is None)
        assert ready(server)[0]


@pytest.mark.full
def test_all_front_ends_tell_of_a_failed_engine():
    with FaultyServer(frontends=2) as server:
        with runner_faults(server, collect=OSError("the cable is out")):
            fail(server).result()
            for _ in range(6):
                assert not ready(server)[0]
        for _ in range(6):
            until(lambda: ready(server)[0])
            assert check(server)[:2] == (True, 200)


class Scripted:
    """A test whose outcomes are given, each once it is let go."""

    def __init__(self):
        self.begun, self.outcomes = 0, asyncio.Queue()

    async def __call__(self):
        self.begun += 1
        if error := await self.outcomes.get():
            raise error


def test_the_verdict_is_that_of_a_test_after_the_error():
    async def main():
        test, seen = Scripted(), []
        found = Health("a", test, seen.append)
        assert await found.verdict() is None
        found.suspect("first")
        await asyncio.sleep(0)
        assert test.begun == 1
        found.suspect("second")  # while the test of the first runs
        later = asyncio.create_task(found.verdict())
        test.outcomes.put_nowait(None)
        await asyncio.sleep(0.02)
        assert not later.done()
        assert found.problem == "second"
        test.outcomes.put_nowait(None)
        assert await later is None
        assert found.problem is None
        found.suspect("third")
        test.outcomes.put_nowait(KeyError("x"))
        assert await found.verdict() == "a test request failed: KeyError"
        found.forget()
        assert await found.verdict() is None
        assert seen == ["first", "second", None, "third",
                        "a test request failed: KeyError", None]  # fmt: skip

    asyncio.run(main())


def test_failed_steps_of_others_do_not_make_an_engine_lost(monkeypatch):
    """Their steps fail again and again, while each test is answered."""
    before, tests = ServedModel.test, []

    async def test_beside_another(model):
        await before(model)
        model.engine.core.failed_steps += 1
        tests.append(model)

    with FaultyServer() as server:
        monkeypatch.setattr(ServedModel, "test", test_beside_another)
        server.engine.core.failed_steps += 1
        until(lambda: ready(server)[0] and len(tests) > 2 * model_slot.LOST_TESTS)
        assert check(server)[:2] == (True, 200)
        assert server.loads == 1


def test_a_model_that_wakes_is_not_judged_by_what_was_before(monkeypatch):
    """A request fails while its model goes to sleep, so that no test can succeed."""
    monkeypatch.setattr(health, "MOST_SECONDS", 600.0)
    monkeypatch.setattr(health, "FIRST_SECONDS", 600.0)
    admin = {"authorization": "Bearer admin"}
    with FaultyServer(admin_keys=("admin",)) as server:
        with server.paused():
            request = server.begin("POST", PATH, BODY)
            until(lambda: server.admission.open)
            sleeping = server.begin("POST", "/sleep", None, admin)
            until(lambda: server.admission.is_asleep)
            server.faults["collect"] = [OSError("the cable is out")]
        assert request.result()[0] == 500
        assert sleeping.result()[0] == 200
        assert server.send("POST", "/wake_up", headers=admin)[0] == 200
        assert check(server)[:2] == (True, 200)
