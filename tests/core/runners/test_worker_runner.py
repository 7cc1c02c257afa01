"""A runner in another process: the same tokens, clear ends, and no hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import inl
from inl import errors
from inl.engine.core import EngineCore
from inl.errors import (
    KernelFailed,
    OutOfMemory,
    ProtocolError,
    RunnerError,
    WorkerLost,
)
from inl.progress import LoadStage
from inl.runners import worker_runner
from inl.runners.group_runner import RankRunner
from inl.runners.worker_runner import WorkerRunner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.message import MASKED, Row, admit_frame, release_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.hash_runner import HashRunner
from inl.workers import process
from waiting import is_running, until


@pytest.fixture
def serve(monkeypatch, small):
    """Start a worker with a runner of ``worker_factories``."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    runners = []

    def begin(factory="hashes", *, limits=None, python=sys.executable, **options):
        names = {"hello_seconds", "silent_seconds", "advice", "abandoned"}
        given = names & options.keys()
        how = {name: options.pop(name) for name in given}
        progress = options.pop("progress", None)
        options["limits"] = asdict(limits or small())
        runner = WorkerRunner(
            python,
            options,
            factory=f"worker_factories:{factory}",
            progress=progress,
            **how,
        )
        runners.append(runner)
        return runner

    yield begin
    for runner in runners:
        runner.close()
        assert not runner.alive


@pytest.fixture
def script(tmp_path):
    """An interpreter that runs a text of Python in place of the worker."""

    def write(text):
        path = tmp_path / "python with spaces"
        path.write_text(f"#!{sys.executable}\nimport os, socket, sys, time\n{text}")
        path.chmod(0o755)
        return str(path)

    return write


def admission(limits, slot=1, **changes):
    return admit_frame(
        slot,
        [[1, 2]],
        groups=1,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        **changes,
    )


def step(number, *rows, flags=0):
    rows = [Row(slot, ids) for slot, ids in rows]
    tokens = sum(len(row.tokens) for row in rows)
    return step_frame(
        Bucket(tokens, len(rows)),
        rows,
        step=number,
        groups=1,
        block_size=4,
        decode_rows=0,
        flags=flags,
    )


def compute(runner, message):
    runner.submit(message)
    return runner.collect()


def loss(runner, message):
    """What is raised once the process is killed, by whichever call notices."""
    os.kill(runner.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost) as caught:
        compute(runner, message)
    return caught.value


def answers(engine, requests):
    """Tokens of each request, after running to the end."""
    numbers = [engine.add(request) for request in requests]
    found = {number: [] for number in numbers}
    while engine.has_work:
        for number, token, _, error in engine.step():
            if error is not None:
                raise error
            if token is not None:
                found[number].append(token)
    return [found[number] for number in numbers]


REQUESTS = (
    {"prompt": range(10), "max_tokens": 9},
    {"prompt": range(12), "max_tokens": 15, "temperature": 0.5, "seed": 3},
    {"prompt": [7], "max_tokens": 12, "temperature": 1.5, "seed": -4},
)


def kill(pid):
    """Kill a child process and wait until it has ended, which takes time."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("moment", ["answered", "skipped"])
def test_the_failure_of_a_group_is_the_worker_that_it_lost(serve, small, moment):
    """Another rank may fail first, of its connection to the lost one."""
    abandoned = threading.Event()
    group = RankRunner(
        lambda rank: serve(("hashes", "refusing")[rank], abandoned=abandoned),
        2,
        abort=abandoned.set,
    )
    group.submit(admission(small()))
    group.submit(step(1, (1, [5])))
    assert group.collect().step == 1

    lost, other = group.runners
    may_fail = threading.Event()

    def answer_and_end(collect=lost.collect):
        reply = collect()
        kill(lost.pid)
        may_fail.set()
        return reply

    def fail_later(collect=other.collect):
        assert may_fail.wait(300)
        return collect()

    def end_once_the_group_has_failed(message, submit=lost.submit):
        submit(message)
        may_fail.set()  # before, this call would be skipped, too
        assert abandoned.wait(300)
        kill(lost.pid)

    other.collect = fail_later
    if moment == "answered":
        lost.collect = answer_and_end
    else:
        lost.submit = end_once_the_group_has_failed
    group.submit(step(2, (1, [6])))
    with pytest.raises(WorkerLost, match=r"rank 0 of 2 failed.*killed by SIGKILL"):
        group.collect()
    group.close()


def test_the_same_tokens_as_in_process(serve, small, answer_of):
    limits = small(blocks=(20,))
    runner = serve(limits=limits)
    assert (runner.limits, runner.device) == (limits, "hash:0")
    requests = [Request(**each) for each in REQUESTS]
    wanted = [answer_of(Request(**each), limits) for each in REQUESTS]
    assert answers(EngineCore(runner), requests) == wanted


def test_a_model_in_a_worker(serve, small):
    from inl.backend.reference import ReferenceBackend
    from inl.device import Device
    from inl.models.llama import MODEL
    from inl.testing.tiny import (
        MemoryCheckpoint,
        local_runner,
        plain_logits,
        tiny_llama,
    )

    limits = small(blocks=(20,), vocab=96)
    made = tiny_llama(np.random.default_rng(3))
    here = local_runner(
        ReferenceBackend(Device("reference")), MODEL, MemoryCheckpoint(*made), limits
    )
    runner = serve("tiny", limits=limits, seed=3)
    assert (runner.device, runner.dtype) == ("reference:0", "float32")
    found = [
        answers(EngineCore(each), [Request(**fields) for fields in REQUESTS])
        for each in (runner, here)
    ]
    assert found[0] == found[1]
    ids = [*range(10)]
    for token in found[0][0]:
        assert token == plain_logits(*made, ids)[-1].argmax()
        ids.append(token)


def test_masks_go_over_the_wire(serve, small):
    limits = small()
    replies = []
    for runner in (serve(), HashRunner(limits)):
        runner.submit(admission(limits))
        runner.submit(step(1, (1, [3, 4, 5]), flags=MASKED))
        masks = np.zeros((1, 4), np.int32)
        masks[0, 1] = 0b1010
        runner.sample(1, masks)
        replies.append(runner.collect())
    assert np.array_equal(replies[0].tokens, replies[1].tokens)
    assert replies[0].tokens[0, 0] in (33, 35)


def test_what_is_wrong_here_is_refused_here(serve, small):
    runner = serve()
    runner.submit(admission(small()))
    with pytest.raises(ProtocolError, match="no step is in flight"):
        runner.collect()
    with pytest.raises(ProtocolError, match="version"):
        runner.submit(np.zeros(40, np.int32))
    with pytest.raises(ProtocolError, match="step 1 does not wait for masks"):
        runner.sample(1, np.zeros((1, 4), np.int32))
    runner.submit(step(1, (1, [3, 4]), flags=MASKED))
    with pytest.raises(ProtocolError, match="call sample first"):
        runner.submit(step(2, (1, [3])))
    with pytest.raises(ProtocolError, match="call sample first"):
        runner.collect()
    runner.sample(1, np.full((1, 4), -1, np.int32))
    runner.submit(step(2, (1, [3])))
    with pytest.raises(ProtocolError, match="2 steps are in flight"):
        runner.submit(step(3, (1, [3])))
    assert [runner.collect().step for _ in range(2)] == [1, 2]


def test_what_is_wrong_there_comes_with_the_next_reply(serve, small):
    runner = serve()
    runner.submit(release_frame(2, groups=1, max_blocks_per_seq=8))
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    with pytest.raises(ProtocolError, match="slot 2 is not admitted"):
        runner.collect()
    with pytest.raises(RunnerError, match=r"failed before .*slot 2"):
        runner.submit(step(2, (1, [3])))


def test_errors_keep_their_class(serve, small):
    runner = serve("refusing")
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    runner.submit(step(2, (1, [3])))
    runner.collect()
    with pytest.raises(KernelFailed, match=r"worker .*rms_norm/test: gave NaN"):
        runner.collect()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_worker_serves_again_once_it_is_reset(serve, small, answer_of, depth):
    limits = small(depth=depth)
    runner = serve("refusing", limits=limits)
    engine = EngineCore(runner)
    for at in range(3):
        fields = {"prompt": [at, 2], "max_tokens": 5}
        request, errors = Request(**fields), []
        engine.add(request)
        while engine.has_work:
            errors += [event.error for event in engine.step() if event.error]
        if at == 0:
            assert [type(each) for each in errors] == [KernelFailed]
        else:
            assert errors == []
            assert request.output_ids == answer_of(Request(**fields), limits)
    assert engine.failed_steps == 1
    assert runner.alive


def test_a_worker_whose_runner_cannot_be_reset_is_lost(serve, small, answer_of):
    engine = EngineCore(serve("unsettled"), replace=lambda _: HashRunner(small()))
    engine.add(Request([1, 2], max_tokens=5))
    while engine.has_work:
        engine.step()
    assert engine.restarts == 1
    request = Request([1, 2], max_tokens=5)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.output_ids == answer_of(Request([1, 2], max_tokens=5), small())


def test_a_worker_without_memory_for_a_step_serves_the_next(serve, small):
    runner = serve("out_of_memory")
    runner.submit(admission(small()))
    runner.submit(admission(small(), slot=2))
    first, second = step(1, (1, range(7))), step(2, (2, [3, 4]))
    runner.submit(first)
    runner.submit(second)
    with pytest.raises(OutOfMemory, match=r"worker .*8 bytes more does not fit"):
        runner.collect()
    own = HashRunner(small())
    own.submit(admission(small(), slot=2))
    own.submit(second)
    found, wanted = runner.collect(), own.collect()
    assert (found.step, found.tokens.tolist()) == (2, wanted.tokens.tolist())
    runner.submit(step(3, (1, range(7)), flags=MASKED))
    runner.sample(3, np.full((1, -(-small().vocab // 32)), -1, np.int32))
    with pytest.raises(OutOfMemory):
        runner.collect()


def test_requests_of_a_step_without_memory_end_alone(serve, small, answer_of):
    limits = small(blocks=(60,))
    engine = EngineCore(
        serve("out_of_memory", limits=limits), SchedulerConfig(token_budget=8)
    )
    kept = Request(range(3), max_tokens=20)
    wanted = answer_of(Request(range(3), max_tokens=20), limits)
    doomed = Request(range(7), max_tokens=4)
    number, errors = engine.add(doomed), {}
    while engine.has_work:
        errors |= {event.request: event.error for event in engine.step() if event.error}
    assert type(errors.pop(number)) is OutOfMemory
    engine.add(kept)
    while engine.has_work:
        errors |= {event.request: event.error for event in engine.step() if event.error}
    assert not errors
    assert kept.output_ids == wanted


@pytest.mark.parametrize("name", ["BackendUnavailable", "OutOfMemory", "InlError"])
def test_why_not_is_carried_over(serve, name):
    with pytest.raises(getattr(errors, name)) as caught:
        serve("failing", raises=name)
    assert type(caught.value).__name__ == name
    assert str(caught.value).endswith("the reason, as it was")
    assert sys.executable in str(caught.value)


def test_errors_of_others_are_named(serve):
    with pytest.raises(RunnerError, match="ValueError: the reason, as it was"):
        serve("failing", raises="Unheard of")
    with pytest.raises(RunnerError, match="no such function"):
        serve("nothing_of_the_kind")


def test_output_of_the_worker_is_not_taken_for_frames(serve, small):
    told = []
    runner = serve("noisy", progress=lambda *done: told.append(done))
    assert told == [(1, 2, LoadStage.LOADING)]
    runner.submit(admission(small()))
    for number in range(1, 4):
        runner.submit(step(number, (1, [number])))
        assert runner.collect().step == number
    assert "a step is done" in str(loss(runner, step(4, (1, [4]))))


def test_a_killed_worker_says_how_it_ended_and_what_to_do(serve, small, tmp_path):
    runner = serve("dying", at=2, flag=str(tmp_path / "died"))
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    runner.submit(step(2, (1, [3])))
    runner.collect()
    with pytest.raises(WorkerLost) as caught:
        runner.collect()
    for words in (
        sys.executable,
        "SIGKILL (signal 9)",
        "computing step 2",
        "on_worker_loss='restart'",
        "last words",
    ):
        assert words in str(caught.value)
    with pytest.raises(RunnerError, match="failed before"):
        runner.collect()


def test_a_worker_that_ends_before_it_is_ready(serve):
    with pytest.raises(WorkerLost, match="exit status 7") as caught:
        serve("quitting")
    assert "cannot go on like this" in str(caught.value)


def test_an_interpreter_without_the_core(serve, script):
    text = "sys.exit(\"No module named 'inl'\")"
    with pytest.raises(WorkerLost, match="No module named 'inl'") as caught:
        serve(python=script(text))
    assert re.search(r"spaces' -m pip install .*core", str(caught.value))


def test_a_program_that_cannot_be_started(serve, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"\x7fnot a program")
    path.chmod(0o755)
    with pytest.raises(RunnerError, match="cannot be started"):
        serve(python=str(path))


def test_a_silent_worker_is_given_up(serve, script):
    with pytest.raises(ProtocolError, match=r"no HELLO within 0\.5 s"):
        serve(python=script("time.sleep(600)"), hello_seconds=0.5)


def test_a_stuck_step_is_a_loss_after_the_time_that_was_given(serve, small):
    runner = serve("stuck")
    runner.silent_seconds = 0.3  # only now: a busy machine starts it slowly
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    with pytest.raises(WorkerLost, match=r"sent nothing for 0\.3 s.*computing step 1;"):
        runner.collect()
    assert not runner.alive
    with pytest.raises(RunnerError, match="failed before"):
        runner.collect()


def test_a_stopped_process_is_given_up_too(serve, small, monkeypatch):
    """Also where the system does not report that it is stopped."""
    monkeypatch.setattr(process, "is_stopped", lambda _: False)
    runner = serve()
    runner.silent_seconds = 0.3
    runner.submit(admission(small()))
    os.kill(runner.pid, signal.SIGSTOP)
    runner.submit(step(1, (1, [3])))
    with pytest.raises(WorkerLost, match="worker_seconds"):
        runner.collect()
    assert not runner.alive


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_stopped_process_is_no_slow_one(serve, small):
    """It is given up although its step may take 60 s."""
    runner = serve()
    runner.submit(admission(small()))
    os.kill(runner.pid, signal.SIGSTOP)
    runner.submit(step(1, (1, [3])))
    with pytest.raises(WorkerLost, match=r"was stopped by a signal.*computing step 1"):
        runner.collect()
    assert not runner.alive


def test_progress_counts_as_an_answer(serve, monkeypatch):
    """The clock goes 5 s on with each report, and stands still between them."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(worker_runner, "time", clock)
    monkeypatch.setattr(worker_runner, "POLL_SECONDS", 0.01)

    def report(*_):
        now[0] += 5.0

    runner = serve("loading", seconds=0.1, silent_seconds=8.0, progress=report)
    assert runner.device == "hash:0"
    assert now == [30.0]


def test_loading_without_a_word_is_a_loss(serve):
    with pytest.raises(WorkerLost, match=r"sent nothing for 0\.2 s.*opening the model"):
        serve("loading", silent_seconds=0.2)


def test_no_advice_where_there_is_nothing_to_set(serve, small):
    runner = serve(advice="")
    runner.submit(admission(small()))
    said = str(loss(runner, step(1, (1, [3]))))
    assert "on_worker_loss" not in said
    assert ". Its last output: nothing" in said


FD = "fd = int(sys.argv[sys.argv.index('--fd') + 1]); s = socket.socket(fileno=fd)\n"


def test_garbage_in_place_of_a_handshake(serve, script):
    text = FD + "s.send(b'HTTP/1.1 200 OK\\r\\n\\r\\n'); time.sleep(60)"
    with pytest.raises(ProtocolError, match="HTTP"):
        serve(python=script(text))


@pytest.mark.parametrize(
    ("name", "value"), [("protocol", 5), ("message", 7), ("contract", [9, 0])]
)
def test_another_version_is_named_on_both_sides(serve, script, name, value):
    text = (
        "from inl.protocol import wire, wire_json\n"
        + FD
        + f"wire.Channel(s).send(wire.Kind.HELLO, wire_json.text("
        f"wire_json.hello() | {{{name!r}: {value!r}, 'core': '7.8.9'}}))\n"
        "time.sleep(60)"
    )
    with pytest.raises(ProtocolError) as caught:
        serve(python=script(text))
    for words in (name, str(value), "7.8.9", inl.__version__, "install the same"):
        assert words in str(caught.value)


def test_another_version_of_the_core_alone_is_no_reason(serve, script):
    text = (
        "import inl\ninl.__version__ = '0.1.7'\n"
        "from inl.runners import worker_main\nsys.exit(worker_main.main(sys.argv[3:]))"
    )
    assert serve(python=script(text)).device == "hash:0"


def test_limits_that_cannot_be(serve):
    with pytest.raises(ProtocolError, match=r"limits\.slots: found -1"):
        serve("impossible")


def test_a_slow_worker_is_waited_for(serve, small):
    runner = serve("slow")
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    assert runner.collect().step == 1


def test_submitting_never_waits(serve, small):
    """More than a socket holds goes to a worker that is stopped, and then is read."""
    limits = small(max_blocks_per_seq=2000, blocks=(5000,), block_size=4)
    runner = serve(limits=limits)
    os.kill(runner.pid, signal.SIGSTOP)
    frame = admit_frame(
        1, [range(1, 1001)], groups=1, max_blocks_per_seq=2000, length=0
    )
    for _ in range(300):
        runner.submit(frame)
    runner.submit(step(1, (1, [3])))
    os.kill(runner.pid, signal.SIGCONT)
    other = HashRunner(limits)
    other.submit(frame)
    other.submit(step(1, (1, [3])))
    assert runner.collect().tokens.tolist() == other.collect().tokens.tolist()


def test_an_interrupted_collect_can_be_called_again(serve, small, monkeypatch):
    runner = serve()
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    runner.submit(step(2, (1, [3])))

    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner._channel, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.collect()
    assert [runner.collect().step for _ in range(2)] == [1, 2]
    assert compute(runner, step(3, (1, [3]))).step == 3


def test_ctrl_c_does_not_reach_the_worker(serve, small):
    runner = serve()
    assert os.getpgid(runner.pid) != os.getpgid(0)
    os.kill(runner.pid, signal.SIGINT)
    runner.submit(admission(small()))
    runner.submit(step(1, (1, [3])))
    assert runner.collect().step == 1
    assert "Traceback" not in str(loss(runner, step(2, (1, [3]))))


@pytest.mark.parametrize("kind", ["hashes", "stuck"])
def test_the_worker_ends_with_its_parent(serve, small, kind):
    text = (
        "import os, sys, signal\nfrom inl.runners.worker_runner import WorkerRunner\n"
        f"runner = WorkerRunner(sys.executable, {{'limits': {asdict(small())!r}}},"
        f"factory='worker_factories:{kind}')\nprint(runner.pid, flush=True)\n"
        "from inl.protocol.wire import Kind\nrunner._send(Kind.COLLECT)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    serve().close()  # only for its PYTHONPATH
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, check=False
    )
    pid = int(found.stdout)
    until(lambda: not is_running(pid))


def test_closing_twice_and_calls_after(serve):
    runner = serve()
    runner.close()
    runner.close()
    with pytest.raises(RunnerError, match="is closed"):
        runner.collect()
