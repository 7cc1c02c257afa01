"""Forked children share nothing with their parent: each starts its own, or refuses."""

from __future__ import annotations

import os

import pytest

from forking import run_script

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system has no fork"
)

TEMPLATES = """
import threading
from forking import fork_all
from inl.text.template import ChatTemplate

template = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}")

def render(name, count=25):
    for number in range(count):
        text = f"{name}/{number}"
        found = template.apply([{"role": "user", "content": text}])
        assert found == f"<{text}>", (found, text)

render("first", 1)
process = template._process._child.pid
# Another thread is rendering while this one forks.
other = threading.Thread(target=render, args=("thread", 200))
other.start()
wait = fork_all(12, lambda index: render(f"child {index}"))
render("parent")
assert wait() == [0] * 12, "a child has failed"
other.join()
render("last")
assert template._process._child.pid == process, "a child has ended the parent's process"
template.close()
print("done")
"""


def test_every_process_gets_the_prompt_that_it_rendered():
    assert run_script(TEMPLATES) == "done\n"


ENGINE = """
import asyncio, sys, threading
import numpy as np
from forking import fork_all
from inl import EngineConfig, InferenceEngine
from inl.errors import RunnerError
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(5), vocab=256))
checkpoint.eos_token_ids = ()

def make(**settings):
    config = EngineConfig(backend="reference", context=96, **settings)
    model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    return InferenceEngine(model, config=config)

prompts = [[at, 7, 9] for at in range(6)]
with make() as plain:
    answers = [each.token_ids for each in plain.generate(prompts, max_tokens=12)]

def check(engine, at):
    assert engine.generate(prompts[at], max_tokens=12).token_ids == answers[at]
"""


def test_children_and_parent_generate_with_the_same_engine():
    """Preloading servers; another thread of the parent is computing a step."""
    code = """
engine = make()
open_in_parent = engine.submit([5] * 9, max_tokens=80)
other = threading.Thread(target=check, args=(engine, 3))
other.start()

def serve(index):
    assert open_in_parent.finish_reason == "error"
    try:
        open_in_parent.completion()
    except RunnerError as error:
        assert "before this process was forked" in str(error)
    check(engine, index)
    for at in (0, 1):
        call = engine.agenerate(prompts[at], max_tokens=12)
        assert asyncio.run(call).token_ids == answers[at]
    scheduler = engine.core.scheduler
    assert not scheduler.live
    assert not any(pool.used_blocks for pool in scheduler.kv_cache.pools)
    engine.close()

wait = fork_all(4, serve)
check(engine, 5)
assert wait() == [0] * 4, "a child has failed"
other.join()
check(engine, 2)
engine.close()
print("done")
"""
    assert run_script(ENGINE + code) == "done\n"


def test_a_fork_within_a_step_and_between_async_steps():
    code = """
waits = []

def on_step(record):
    if not waits:
        waits.append(fork_all(1, lambda index: forked(index)))

def forked(index):
    # The step goes on in the child, whose caller learns that its request is lost.
    global engine
    engine = make()
    check(engine, 1)

engine = make(max_batch=2)
engine.core._on_step = on_step
check(engine, 0)
assert waits[0]() == [0]

async def main():
    task = asyncio.create_task(engine.agenerate(prompts[4], max_tokens=12))
    await asyncio.sleep(0.01)
    wait = fork_all(2, lambda index: check(engine, index))
    assert (await task).token_ids == answers[4]
    return wait

wait = asyncio.run(main())
assert wait() == [0, 0]
print("done")
"""
    assert run_script(ENGINE + code) == "done\n"


def test_the_trace_holds_the_parents_steps_only(tmp_path):
    code = """
from inl.recording.trace_file import read_trace
engine = make(trace=sys.argv[1])
check(engine, 0)
wait = fork_all(3, lambda index: check(engine, index))
assert wait() == [0] * 3
check(engine, 4)
engine.close()
with make() as alone:
    check(alone, 0), check(alone, 4)
    assert len(read_trace(sys.argv[1])) == len(alone.recorder._ring) + 1
print("done")
"""
    assert run_script(ENGINE + code, str(tmp_path / "trace")) == "done\n"


WORKER = """
import os, sys
from dataclasses import asdict
from forking import fork_all
from inl.engine.core import EngineCore
from inl.errors import RunnerError
from inl.runners.group_runner import RankRunner
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.runners.worker_runner import WorkerRunner

limits = Limits(5, (30,), 4, 8, 100)
options = {"limits": asdict(limits)}

def worker(rank=0):
    return WorkerRunner(sys.executable, options, factory="worker_factories:hashes")

def answer(core):
    request = Request([1, 2, 3], max_tokens=8)
    core.add(request)
    while core.has_work:
        for event in core.step():
            if event.error is not None:
                raise event.error
    return request.output_ids
"""


@pytest.mark.parametrize("make", ["worker()", "RankRunner(worker, 2, abort=print)"])
def test_a_worker_serves_the_process_that_started_it(make):
    code = f"""
runner = {make}
core = EngineCore(runner)
first = answer(core)

def serve(index):
    try:
        answer(core)
    except RunnerError as error:
        assert "was started before this process was forked" in str(error), error
        assert "create the engine in the child" in str(error)
    else:
        raise AssertionError("computed")
    runner.close()

wait = fork_all(3, serve)
assert wait() == [0] * 3
assert answer(core) == first
runner.close()
print("done")
"""
    assert run_script(WORKER + code) == "done\n"


def test_a_backend_that_cannot_refuses_by_name():
    code = """
from inl.backend.base import ForkSafety
from inl.backend.reference import ReferenceBackend
offers = ReferenceBackend.offers
ReferenceBackend.offers = lambda self, kind: (
    None if kind is ForkSafety else offers(self, kind)
)
engine = make()

def serve(index):
    try:
        check(engine, 0)
    except RunnerError as error:
        assert "reference:0: was started before this process was forked" in str(error)
    else:
        raise AssertionError("computed")
    with make() as own:
        check(own, 0)
    engine.close()

check(engine, 1)
assert fork_all(2, serve)() == [0] * 2
check(engine, 2)
print("done")
"""
    assert run_script(ENGINE + code) == "done\n"
