"""Exceptions at any instruction of the engine: nothing is lost, the next call works."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import suppress

import pytest

from depth import scaled
from inl.errors import RunnerError
from inl.testing.hash_runner import HashRunner
from interrupts import Injector, Strange

# An exception that is raised while a generator is finalized.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

PROMPTS = [[7, 8, 9], list(range(30)), [5] * 14]
OPTIONS = {"max_tokens": 7, "temperature": 0.8, "seed": 3, "logprobs": 1}
NEXT = [3, 1, 4, 1, 5]


def generate(engine):
    return [each.token_ids for each in engine.generate(PROMPTS, **OPTIONS)]


def stream(engine):
    options = {name: OPTIONS[name] for name in ("max_tokens", "temperature", "seed")}
    # A stop string that is not generated: every step searches the text.
    return "".join(engine.stream(PROMPTS[1], stop=["\N{SNOWMAN}", "zzzz"], **options))


def agenerate(engine):
    async def main():
        return await engine.agenerate(PROMPTS, **OPTIONS)

    return [each.token_ids for each in asyncio.run(main())]


CALLS = {"generate": generate, "stream": stream, "agenerate": agenerate}


def check_is_whole(engine):
    """Let the engine come to rest; nothing may be left of any request."""
    for thread in threading.enumerate():
        if thread.name == "inl-async":
            thread.join(60)
            assert not thread.is_alive(), "the background thread goes on"
    for _ in range(20):
        if not engine.core.has_work:
            break
        engine.step()
    core, scheduler = engine.core, engine.core.scheduler
    assert not core.has_work
    assert not scheduler.live
    assert not scheduler.running
    assert not len(scheduler.waiting)
    assert not scheduler.waiting.tokens
    assert not scheduler.in_flight
    assert not scheduler.kv_cache.has_pending_frees
    for pool in scheduler.kv_cache.pools:
        assert pool.used_blocks == 0
        assert pool.available_blocks == pool.blocks - 1
    assert not core.runner._in_flight
    if isinstance(core.runner, HashRunner):
        assert core.runner.slots_in_use == []
    dispatcher = engine._dispatcher
    assert not dispatcher._open
    assert not dispatcher._cancelled
    assert not dispatcher.step_loop._open
    assert dispatcher.lock.try_run(lambda: None)


def count_events(engine, call, events, **options):
    with Injector(events=events, **options) as counter:
        call(engine)
    return counter.count


def interrupt_at(engine, call, wanted, **options):
    """Call with one exception; returns whether it was raised."""
    # One in another thread fails the requests, one in this thread is raised.
    raised = RunnerError if "threads" in options else (KeyboardInterrupt, Strange)
    found = wanted
    with Injector(**options) as injector, suppress(raised):
        found = call(engine)
    assert found == wanted, injector.place
    return injector


def run_everywhere(engine, call, events, *, most, **options):
    """Interrupt ``call`` at up to ``most`` of its events and check what is left."""
    wanted, after = call(engine), engine.generate(NEXT, max_tokens=6).token_ids
    count = count_events(engine, call, events, **options)
    step = max(count // most, 1)
    fired = 0
    for at in range(1, count + step, step):
        error = (KeyboardInterrupt, Strange)[at // step % 2]
        injector = interrupt_at(
            engine, call, wanted, at=at, events=events, error=error, **options
        )
        fired += injector.place is not None
        try:
            check_is_whole(engine)
            assert engine.generate(NEXT, max_tokens=6).token_ids == after
        except BaseException as problem:
            problem.add_note(f"after event {at} of {count}: {injector.place}")
            raise
    assert fired > min(count, most) // 2
    return fired, count


EVENTS = [
    "calls",
    pytest.param("lines", marks=pytest.mark.full),
    pytest.param("opcodes", marks=pytest.mark.full),
]


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch):
    """Threads that an injected exception ends are expected."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield
    gc.collect()


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_may_be_interrupted_anywhere(hashed, report, name, events):
    # Blocks for two of the three prompts: the latest one is preempted.
    engine = hashed(blocks=19)
    most = scaled(150, 100_000 if events != "opcodes" else 20_000)
    fired, count = run_everywhere(engine, CALLS[name], events, most=most)
    report(f"{name}: interrupted at {fired} of {count} {events}")


@pytest.mark.parametrize("events", EVENTS)
def test_the_background_thread_may_be_interrupted_anywhere(hashed, report, events):
    """The tasks get the answer or an error at once, and later ones are served."""
    engine = hashed(blocks=19)
    most = scaled(150, 100_000 if events != "opcodes" else 20_000)
    fired, count = run_everywhere(engine, agenerate, events, most=most, threads=True)
    report(f"background thread: interrupted at {fired} of {count} {events}")


@pytest.mark.parametrize("events", EVENTS)
def test_another_threads_requests_are_answered(hashed, report, events):
    engine = hashed(blocks=60)
    prompts = [[at] * 9 for at in range(20)]
    wanted = [engine.generate(prompt, max_tokens=9).token_ids for prompt in prompts]
    stopping, found = threading.Event(), []

    def serve():
        try:
            while not stopping.is_set():
                at = len(found) % len(prompts)
                answer = engine.generate(prompts[at], max_tokens=9)
                found.append(answer.token_ids == wanted[at])
        except BaseException as error:
            found.append(error)

    other = threading.Thread(target=serve)
    other.start()
    call, result = CALLS["generate"], generate(engine)
    count = count_events(engine, call, events)
    step = max(count // scaled(60, 2_000), 1)
    for at in range(1, count, step):
        interrupt_at(engine, call, result, at=at, events=events)
    stopping.set()
    other.join(60)
    assert not other.is_alive()
    assert set(found) == {True}
    check_is_whole(engine)
    report(f"{len(found)} answers beside {count // step} interrupts")


def test_a_model_computes_the_same_after_an_interrupt(engines, report):
    """The reference backend spoils the state that an interrupted program consumed."""
    engine = engines()
    fired, count = run_everywhere(engine, generate, "calls", most=scaled(25, 2_000))
    report(f"reference backend: interrupted at {fired} of {count} calls")
