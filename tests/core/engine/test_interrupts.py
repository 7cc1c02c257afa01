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
from waiting import until

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


def structured(engine):
    pytest.importorskip("llguidance")
    first = engine.generate(
        PROMPTS[1], n=3, structured={"regex": "(one|two|three)-[a-c]+ end"},
        max_tokens=12, temperature=0.8, seed=3,
    )  # fmt: skip
    return [each.token_ids for each in (first, *first.alternatives)]


CALLS = {
    "structured": structured,
    "generate": generate,
    "stream": stream,
    "agenerate": agenerate,
}


def check_is_whole(engine):
    """Let the engine come to rest; nothing may be left of any request."""
    for thread in threading.enumerate():
        if thread.name == "inl-async":
            thread.join(300)
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
    check_is_whole(engine)  # events are those of threads that start from here on
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


MOST = {
    "calls": scaled(80, 200, 400),
    "lines": scaled(100, 100, 300),
    "opcodes": scaled(100, 100, 300),
}
"""Most interrupts of a test, spread over all events. 100,000 takes every one."""

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
    most = MOST[events]
    fired, count = run_everywhere(engine, CALLS[name], events, most=most)
    report(f"{name}: interrupted at {fired} of {count} {events}")


@pytest.mark.parametrize("events", EVENTS)
def test_the_background_thread_may_be_interrupted_anywhere(hashed, report, events):
    """The tasks get the answer or an error at once, and later ones are served."""
    engine = hashed(blocks=19)
    most = MOST[events]
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
    until(lambda: found)
    call, result = CALLS["generate"], generate(engine)
    count = count_events(engine, call, events)
    step = max(count // scaled(40, 80, 200), 1)
    for at in range(1, count, step):
        interrupt_at(engine, call, result, at=at, events=events)
    stopping.set()
    other.join(300)
    assert not other.is_alive()
    assert set(found) == {True}
    check_is_whole(engine)
    report(f"{len(found)} answers beside {count // step} interrupts")


def test_a_model_computes_the_same_after_an_interrupt(engines, report):
    """The reference backend spoils the state that an interrupted program consumed."""
    engine = engines()
    fired, count = run_everywhere(engine, generate, "calls", most=scaled(12, 60, 150))
    report(f"reference backend: interrupted at {fired} of {count} calls")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Strange, SystemExit, ValueError])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_of_a_callback_loses_nothing(hashed, name, error):
    def on_step(record):
        if record.step == failing:
            raise error

    engine = hashed(on_step=on_step)
    failing = 0
    wanted, after = CALLS[name](engine), engine.generate(NEXT, max_tokens=6).token_ids
    cached = engine.generate(PROMPTS[1], max_tokens=1).cached_tokens
    assert cached
    for step in range(1, 7):
        failing = engine.stats.steps + step
        # A background thread reports it to the tasks.
        with pytest.raises(RunnerError if name == "agenerate" else error):
            CALLS[name](engine)
        check_is_whole(engine)
        assert engine.generate(NEXT, max_tokens=6).token_ids == after
    assert engine.generate(PROMPTS[1], max_tokens=1).cached_tokens == cached
    assert CALLS[name](engine) == wanted


class Failing(HashRunner):
    """Raises once, in the n-th call from outside, before or after its work."""

    countdown = 0
    late = False

    def act(self, work, *args):
        self.countdown -= 1
        if not self.countdown and not self.late:
            raise Strange
        result = work(*args)
        if not self.countdown:
            raise Strange
        return result

    def submit(self, message):
        self.act(super().submit, message)

    def sample(self, step, masks):
        self.act(super().sample, step, masks)

    def collect(self):
        return self.act(super().collect)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_runner_may_raise_any_exception(hashed, name, late):
    engine = hashed(runner=Failing)
    engine.runner.late = late
    masked = {"max_tokens": 4, "allowed_token_ids": range(50)}
    wanted = engine.generate(NEXT, **masked).token_ids
    for call in range(1, 14):
        engine.runner.countdown = call
        with pytest.raises(RunnerError if name == "agenerate" else Strange):
            CALLS[name](engine)
        check_is_whole(engine)
        engine.runner.countdown = 1 + call % 9
        with pytest.raises(Strange):
            engine.generate(NEXT, **masked)
        assert engine.generate(NEXT, **masked).token_ids == wanted
    check_is_whole(engine)


def test_submitted_requests_go_on_exactly_after_an_interrupt(hashed):
    """Tokens, text and log-probabilities; the interrupted call was another one."""
    plain = hashed(blocks=60)
    options = [{**OPTIONS, "max_tokens": 40}, {"max_tokens": 40, "stop": "zzzz"}]
    wanted = [plain.generate(PROMPTS[1], **each) for each in options]
    engine = hashed(blocks=60)
    for at in range(5, 400, scaled(130, 20, 8)):
        handles = [engine.submit(PROMPTS[1], **each) for each in options]
        texts = ["", ""]
        for step in range(200):
            with suppress(KeyboardInterrupt), Injector(at + 40 * step, "lines"):
                engine.step()
            texts = [
                text + handle.take()
                for text, handle in zip(texts, handles, strict=True)
            ]
            if step > 12 and all(handle.completed for handle in handles):
                break
        for want, text, handle in zip(wanted, texts, handles, strict=True):
            found = handle.completion()
            assert found.token_ids == want.token_ids
            assert found.logprobs == want.logprobs
            assert found.finish_reason == want.finish_reason
            assert found.text == text == want.text
    check_is_whole(engine)


def test_reading_text_may_be_interrupted_anywhere(hashed):
    engine = hashed()
    options = {"max_tokens": 40, "temperature": 1.5, "seed": 4}
    wanted = engine.generate(PROMPTS[0], **options).text
    with Injector(events="opcodes") as counter:
        _ = engine.submit(PROMPTS[0]).text
    for at in range(1, counter.count + 1, scaled(60, 15, 5)):
        handle = engine.submit(PROMPTS[0], **options)
        text = ""
        while not handle.completed:
            engine.step()
            if len(handle.token_ids) % 5 == 0:
                with suppress(KeyboardInterrupt), Injector(at, "opcodes"):
                    _ = handle.text
                text += handle.take()
        assert text + handle.take() == handle.text == wanted
