"""Workers that a plugin's place starts, and those that are started by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from free_ports import unused_address
from inl import EngineConfig
from inl.engine.core import EngineCore
from inl.errors import DeviceError, RunnerError, WorkerLost
from inl.executor.model_loader import open_model
from inl.plugin import load_registry
from inl.runners.rank_startup import Rendezvous
from inl.runners.startup import start
from inl.runners.worker_runner import WorkerRunner
from inl.scheduling.request import Request
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.tiny import plain_logits, tiny_llama
from inl.workers import address as addresses
from inl.workers import heartbeat, place
from inl.workers.address import WorkerAddress, parse_worker
from inl.workers.heartbeat_process import DESCRIPTORS
from started_workers import Child
from waiting import is_running, until

SECRET = "5a" * 32

PLUGIN = """
from inl.plugin import hookimpl

@hookimpl
def inl_register_places(register):
    for name in ("child", "broken", "odd", "ending", "mute"):
        register(name, f"fake_places:{name}")
"""


class Places:
    """The functions of the plugin's places."""

    def __init__(self):
        self.started = []

    def child(self, request):
        self.requests = getattr(self, "requests", []) + [request]
        child = Child(request.arguments, request.environment)
        self.started.append(child)
        return child

    def broken(self, request):
        raise ConnectionRefusedError("no cluster here")

    def odd(self, request):
        return "started"

    def ending(self, request):
        return Child(["-c", "print('no such image'); raise SystemExit(3)"], {})

    def mute(self, request):
        return Child(["-c", "import time; time.sleep(600)"], {})


@pytest.fixture
def places(monkeypatch, tmp_path):
    """The plugin ``fake_places``, installed in this process."""
    (tmp_path / "fake_places.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    known = load_registry((), ["fake_places"])
    assert known.failed == ()
    import fake_places

    made = Places()
    for name in ("child", "broken", "odd", "ending", "mute"):
        setattr(fake_places, name, getattr(made, name))
    monkeypatch.setattr(addresses, "registry", lambda: known)
    monkeypatch.setattr(place, "registry", lambda: known)
    yield made
    del sys.modules["fake_places"]
    for child in made.started:
        child.stop(0.0)


@pytest.fixture
def serve(monkeypatch, small, places):
    """Start a worker with a runner of ``worker_factories`` at a place."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    for name in ("SECRET", "SECRET_FILE", "ADDRESS", "INSECURE"):
        monkeypatch.delenv(f"INL_WORKER_{name}", raising=False)
    runners = []

    def begin(scheme="child", factory="hashes", target="", **options):
        limits = asdict(options.pop("limits", None) or small())
        runner = WorkerRunner(
            WorkerAddress(target, "cpu:0", scheme),
            {"limits": limits},
            factory=f"worker_factories:{factory}",
            **options,
        )
        runners.append(runner)
        return runner

    yield begin
    for runner in runners:
        runner.close()
        assert not runner.alive


def step(number):
    return step_frame(
        Bucket(1, 1), [Row(1, [3])], step=number, groups=1, block_size=4, decode_rows=0
    )


def compute(runner, message):
    runner.submit(message)
    return runner.collect()


def admission(limits):
    return admit_frame(
        1, [[1, 2]], groups=1, max_blocks_per_seq=limits.max_blocks_per_seq
    )


def answer(runner):
    request = Request(range(10), max_tokens=9)
    core = EngineCore(runner)
    core.add(request)
    while core.has_work:
        core.step()
    return request.output_ids


def test_names_of_devices_at_places(places):
    assert parse_worker("child:a/b c/cuda:1") == WorkerAddress(
        "a/b c", "cuda:1", "child"
    )
    assert parse_worker("child:cuda:1") == WorkerAddress("", "cuda:1", "child")
    for name in ("child:auto", "child:gpu-7/auto", "join:[::1]:70/cpu:0", "join:cpu:0"):
        assert str(parse_worker(name)) == name
    # A name of a device stays one, whatever places there are.
    assert parse_worker("child:0") is None
    with pytest.raises(DeviceError, match=r"place 'other', accepted: broken, child, "):
        parse_worker("other:x/cpu:0")
    with pytest.raises(DeviceError, match="device"):
        parse_worker("child:x/CPU")


def test_the_same_tokens_as_in_process(serve, places, small, answer_of):
    limits = small(blocks=(20,))
    runner = serve(limits=limits)
    assert (runner.limits, runner.device) == (limits, "hash:0")
    assert runner.pid == places.started[0].process.pid
    assert runner.where == f"worker {places.started[0].name}"
    assert answer(runner) == answer_of(Request(range(10), max_tokens=9), limits)
    runner.close()
    assert places.started[0].process.returncode == 0


def test_the_secret_is_on_no_command_line(serve, places):
    serve()
    (request,) = places.requests
    secret = request.environment["INL_WORKER_SECRET"]
    assert len(bytes.fromhex(secret)) == 32
    command = Path(f"/proc/{places.started[0].process.pid}/cmdline").read_bytes()
    assert b"worker_main" in command
    assert secret.encode() not in command
    serve()
    assert places.requests[1].environment["INL_WORKER_SECRET"] != secret


def test_a_killed_worker_is_lost_with_its_name_and_place(serve, places, small):
    runner = serve("child", "noisy")
    runner.submit(admission(small()))
    runner.submit(step(1))
    runner.collect()
    os.kill(runner.pid, signal.SIGKILL)
    until(lambda: not runner.alive)
    # The call that notices it may be either.
    how = "closed its connection while (computing step 2|waiting for a step); "
    with pytest.raises(WorkerLost, match=how) as caught:
        compute(runner, step(2))
    for words in (
        f"worker {places.started[0].name} (process {runner.pid} at 127.0.0.1:",
        "on_worker_loss='restart'",
        "loading the hashes",
    ):
        assert words in str(caught.value)
    with pytest.raises(RunnerError, match="failed before"):
        runner.submit(step(9))


def test_a_worker_of_a_failed_group_is_ended_without_a_wait(serve, places):
    """It may wait itself, for a rank that is gone."""
    abandoned = threading.Event()
    runner = serve("child", abandoned=abandoned)
    abandoned.set()
    runner.close()
    assert places.started[0].stops == [0.0]


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs /proc")
def test_a_stopped_worker_is_lost(serve, small):
    """Long before the silence that a busy one may keep."""
    runner = serve()
    runner.submit(admission(small()))
    os.kill(runner.pid, signal.SIGSTOP)
    # The call that notices it may be either.
    how = "was stopped by a signal while (computing step 1|waiting for a step)"
    with pytest.raises(WorkerLost, match=how):
        compute(runner, step(1))


def test_ranks_meet_where_rank_0_has_joined_from(places, monkeypatch, tmp_path):
    """Two ranks over TCP, at an address that the worker of rank 0 has reserved."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    config, tensors = tiny_llama(np.random.default_rng(4))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    agreed, agree = [], Rendezvous.agree

    def record(self, rank, offer, seconds, abandoned):
        agreed.append((rank, offer, agree(self, rank, offer, seconds, abandoned)))
        return agreed[-1][2]

    monkeypatch.setattr(Rendezvous, "agree", record)
    settings = EngineConfig(
        backend="child:here/reference", placement="tensor=2", context=64,
        dtype="float32",
    )  # fmt: skip
    runner = start(open_model(tmp_path), settings).runner
    try:
        found = answer(runner)
    finally:
        runner.close()
    exact = plain_logits(config, tensors, [*range(10), *found[:-1]])[-len(found) :]
    assert found == list(exact.argmax(-1))
    (_, first, _), (_, second, _) = sorted(agreed)
    assert first != second
    assert {address for _, _, address in agreed} == {first}


def test_a_long_step_does_not_silence_a_worker(serve, small, monkeypatch):
    """Heartbeats go on beside a step that never ends."""
    runner = serve("child", "stuck")
    runner.submit(admission(small()))
    runner.submit(step(1))
    beats, receive = [], heartbeat.Heartbeat._receive

    def count(self):
        beats.append(receive(self))

    monkeypatch.setattr(heartbeat.Heartbeat, "_receive", count)
    until(lambda: len(beats) > 5)
    assert runner.alive


def test_the_worker_ends_with_its_engine(serve, small):
    """Even where it is stuck in a step."""
    text = (
        "import os, signal, subprocess, sys\n"
        "from inl.workers import place\n"
        "from inl.workers.address import WorkerAddress\n"
        "from inl.plugin import builtin_registry\n"
        "from inl.runners.worker_runner import WorkerRunner\n"
        "from started_workers import Child\n"
        "class Known:\n"
        "    def function(self, kind, name):\n"
        "        return '', lambda r: Child(r.arguments, r.environment)\n"
        "place.registry = Known\n"
        f"runner = WorkerRunner(WorkerAddress('', 'cpu:0', 'child'),"
        f" {{'limits': {asdict(small())!r}}}, factory='worker_factories:stuck')\n"
        "print(runner.pid, flush=True)\n"
        "from inl.protocol.wire import Kind\nrunner._send(Kind.COLLECT)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", text], stdout=-1, check=False)
    pid = int(done.stdout)
    until(lambda: not is_running(pid))


def test_a_worker_that_ends_before_it_connects(serve):
    with pytest.raises(WorkerLost, match="ended before it had connected") as caught:
        serve("ending")
    assert "no such image" in str(caught.value)


def test_a_worker_that_never_connects(serve):
    with pytest.raises(WorkerLost, match=r"did not connect to 127.* within 0\.5 s"):
        serve("mute", silent_seconds=0.5)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("broken", "cannot start a worker: ConnectionRefusedError: no cluster here"),
        ("odd", "returned str, accepted: an inl.workers.place.Started"),
        ("absent", "place absent: no plugin that works registers it"),
    ],
)
def test_a_place_that_does_not_work(serve, scheme, words):
    with pytest.raises(DeviceError, match=words):
        serve(scheme)


@pytest.fixture
def address():
    """A free port."""
    return unused_address()


@pytest.fixture
def by_hand(address):
    """Start workers as somebody would at another terminal."""
    started = []

    def start(*words, secret=None, factory="hashes"):
        names = {"INL_WORKER_ADDRESS": address}
        names |= {"INL_WORKER_SECRET": secret} if secret else {}
        main = ["-m", "inl.runners.worker_main", "--connect"]
        child = Child([*main, "--factory", f"worker_factories:{factory}"], names)
        started.append(child)
        return child

    yield start
    for child in started:
        child.stop(0.0)


def test_a_worker_that_joins(serve, by_hand, address, small, answer_of, monkeypatch):
    """It may be there before the engine, and one with a wrong secret is no obstacle."""
    secret = SECRET
    monkeypatch.setenv("INL_WORKER_SECRET", secret)
    child = by_hand()
    wrong = by_hand(secret="00" * 32)
    runner = serve("join", target=address)
    assert runner.pid == child.process.pid
    assert runner.where == f"worker 0 of {address}"
    assert answer(runner) == answer_of(Request(range(10), max_tokens=9), small())
    assert wrong.process.wait(300) == 2
    assert "ProtocolError: engine 127" in wrong.log_tail
    late = by_hand()
    assert late.process.wait(300) == 2
    assert f"seat 0 is taken by process {runner.pid}" in late.log_tail
    runner.close()
    assert child.process.wait(300) == 0


def test_a_worker_that_joins_in_place_of_a_lost_one(
    serve, by_hand, address, answer_of, small, monkeypatch
):
    monkeypatch.setenv("INL_WORKER_SECRET", SECRET)
    by_hand()

    def again(error):
        assert isinstance(error, WorkerLost)
        by_hand()
        return serve("join", target=address)

    runner = serve("join", target=address)
    core = EngineCore(runner, replace=again)
    request = Request(range(10), max_tokens=9)
    core.add(request)
    for _ in range(4):
        core.step()
    os.kill(runner.pid, signal.SIGKILL)
    while core.has_work:
        core.step()
    assert core.restarts == 1
    wanted = answer_of(Request(range(10), max_tokens=9), small())
    assert request.output_ids == wanted


def test_joining_needs_a_secret(serve, address):
    with pytest.raises(DeviceError, match=r"found no secret, .* INL_WORKER_SECRET"):
        serve("join", target=address)


@pytest.fixture
def other_host():
    """A network namespace, which is joined to this one by a pair of devices."""
    name = f"inl-{os.getpid()}"

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    near, far = f"inla{os.getpid()}", f"inlb{os.getpid()}"
    ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
    ip("addr", "add", "10.251.7.1/30", "dev", near)
    ip("link", "set", near, "up")
    for words in (
        ("addr", "add", "10.251.7.2/30", "dev", far),
        ("link", "set", far, "up"),
        ("link", "set", "lo", "up"),
    ):
        ip("-n", name, *words)
    yield name, lambda: ip("-n", name, "link", "set", far, "down")
    ip("link", "del", near)
    ip("netns", "del", name)


@pytest.mark.full
def test_a_network_that_is_cut(serve, other_host, small, places, monkeypatch):
    """The worker's process lives, its host answers nothing: both sides give up."""
    name, cut = other_host
    monkeypatch.setenv("INL_WORKER_ADDRESS", "10.251.7.1:0")
    inside = ["ip", "netns", "exec", name, sys.executable]

    def there(request):
        child = Child(request.arguments, request.environment, inside)
        places.started.append(child)
        return child

    monkeypatch.setattr(sys.modules["fake_places"], "child", there)
    runner = serve("child", "stuck")
    assert "10.251.7.2" in runner._process.peer
    assert runner._channel._socket.version() == "TLSv1.3"
    runner.submit(admission(small()))
    runner.submit(step(1))
    cut()
    with pytest.raises(WorkerLost, match=r"its host answered nothing for 1 s"):
        runner.collect()
    until(lambda: not places.started[0].alive)
