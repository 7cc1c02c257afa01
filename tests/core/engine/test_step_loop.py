"""Concurrent use of one engine: agenerate, astream and threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from held_runner import HeldRunner, wait_submitted
from inl.engine import step_loop
from inl.engine.batch import Batch
from inl.engine.step_loop import THREAD_NAME, AsyncStepLoop
from inl.errors import PromptTooLong, RequestError, RunnerError
from inl.testing.hash_runner import HashRunner
from waiting import until

PROMPTS = [[7], list(range(30)), [9, 9, 9], list(range(50, 90)), [1, 2]]
OPTIONS = [
    {"max_tokens": 30, "temperature": 0.8, "seed": 3},
    {"max_tokens": 17},
    {"max_tokens": 25, "temperature": 1.0, "seed": 1, "top_p": 0.5},
    {"max_tokens": 9, "logprobs": 2},
    {"max_tokens": 40, "frequency_penalty": 0.5},
]


class SlowRunner(HashRunner):
    """Takes 2 ms per step, so that other calls can come in between."""

    seconds = 0.002

    def collect(self):
        time.sleep(self.seconds)
        return super().collect()


def background_threads():
    return [each for each in threading.enumerate() if each.name == THREAD_NAME]


def join_background_thread():
    for thread in background_threads():
        thread.join(timeout=300)
        assert not thread.is_alive(), "the background thread goes on"


def test_an_idle_thread_takes_the_next_request(hashed, monkeypatch):
    monkeypatch.setattr(step_loop, "IDLE_SECONDS", 300)
    before, engine = set(background_threads()), hashed()
    for _ in range(3):
        asyncio.run(engine.agenerate([1, 2], max_tokens=2))
    (thread,) = set(background_threads()) - before
    monkeypatch.setattr(step_loop, "IDLE_SECONDS", 0)
    engine._dispatcher.step_loop._wake.set()
    thread.join(timeout=300)
    assert not thread.is_alive()


def test_an_idle_thread_keeps_no_engine(monkeypatch):
    monkeypatch.setattr(step_loop, "IDLE_SECONDS", 300)
    loop = AsyncStepLoop(print, print, print, lambda: False)
    loop._start_thread()
    thread, wake, kept = loop._thread, loop._wake, weakref.ref(loop)
    del loop
    until(lambda: gc.collect() is not None and kept() is None)
    assert thread.is_alive(), "it waits for requests"
    wake.set()
    thread.join(timeout=300)
    assert not thread.is_alive()


def is_drained_later(engine, drained):
    """Wait until the background thread has ended; return whether nothing is left."""
    join_background_thread()
    return drained(engine)


async def streamed(engine, prompt, **options):
    return "".join([piece async for piece in engine.astream(prompt, **options)])


def test_async_calls_give_the_same_and_share_steps(hashed, drained):
    alone = hashed()
    wanted = [
        alone.generate(prompt, **options)
        for prompt, options in zip(PROMPTS, OPTIONS, strict=True)
    ]
    steps = []
    engine = hashed(runner=HeldRunner, on_step=steps.append)
    gate = engine.core.runner.gate
    gate.hold_after(0)

    async def main():
        pairs = list(zip(PROMPTS, OPTIONS, strict=True))
        whole = [engine.agenerate(prompt, **options) for prompt, options in pairs]
        texts = [streamed(engine, prompt, **options) for prompt, options in pairs]
        answers = asyncio.gather(asyncio.gather(*whole), asyncio.gather(*texts))
        await asyncio.to_thread(wait_submitted, engine, 2 * len(pairs))
        gate.release()
        return await answers

    whole, texts = asyncio.run(main())
    for found, want, text in zip(whole, wanted, texts, strict=True):
        assert (found.token_ids, found.text) == (want.token_ids, want.text)
        assert (found.logprobs, text) == (want.logprobs, want.text)
    assert max(step.rows for step in steps) == 8, "all slots"
    assert is_drained_later(engine, drained)


def test_strings_and_lists(hashed):
    engine = hashed()
    wanted = engine.generate(["one", "two"], max_tokens=5)

    async def main():
        single = await engine.agenerate("one", max_tokens=5)
        return single, await engine.agenerate(["one", "two"], max_tokens=5)

    single, several = asyncio.run(main())
    assert single.token_ids == wanted[0].token_ids
    assert [each.text for each in several] == [each.text for each in wanted]


def test_a_model_computes_the_same(engines):
    engine = engines()
    options = {"max_tokens": 10, "temperature": 1.0, "seed": 6, "top_k": 20}
    wanted = engine.generate("async", **options)

    async def main():
        texts = [streamed(engine, "async", **options) for _ in range(3)]
        return await asyncio.gather(*texts)

    assert asyncio.run(main()) == [wanted.text] * 3


@pytest.mark.parametrize("way", ["timeout", "cancel", "aclose", "break", "dropped"])
def test_an_abandoned_call_frees_its_blocks(hashed, drained, way):
    is_held = way in ("timeout", "cancel")
    engine = hashed(runner=HeldRunner if is_held else SlowRunner)
    if is_held:
        gate = engine.core.runner.gate
        gate.hold_after(5)

    async def read(count):
        stream = engine.astream([5, 6, 7], max_tokens=100)
        async for _ in stream:
            count -= 1
            if not count:
                break
        if way == "aclose":
            await stream.aclose()

    async def main():
        other = asyncio.create_task(engine.agenerate([8], max_tokens=60))
        if way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await engine.agenerate([[1], [2, 3]], max_tokens=100)
        elif way == "cancel":
            task = asyncio.create_task(read(1000))
            assert await asyncio.to_thread(gate.is_held.wait, 300)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "dropped":
            stream = engine.astream([5], max_tokens=100)
            await anext(stream)
            del stream
            gc.collect()
            await asyncio.sleep(0)
        else:
            await read(2)
        if is_held:
            gate.release()
        return await other

    found = asyncio.run(main())
    assert len(found.token_ids) == 60
    assert is_drained_later(engine, drained)
    assert engine.generate([8], max_tokens=60).token_ids == found.token_ids


def test_a_task_cancelled_before_it_starts_leaves_nothing(hashed, drained):
    engine = hashed(runner=SlowRunner)

    async def main():
        tasks = [
            asyncio.create_task(engine.agenerate("text", max_tokens=50))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(e, asyncio.CancelledError) for e in asyncio.run(main()))
    assert is_drained_later(engine, drained)


def test_a_failing_runner_reaches_every_task(hashed):
    class Failing(SlowRunner):
        left = 10

        def collect(self):
            self.left -= 1
            if not self.left:
                raise OSError("the wire is cut")
            return super().collect()

    engine = hashed(runner=Failing)

    async def main():
        calls = [engine.agenerate([at], max_tokens=50) for at in range(5)]
        calls += [streamed(engine, [at], max_tokens=50) for at in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(main()):
        assert type(error) is RunnerError
        assert "the wire is cut" in str(error)
    wanted = hashed().generate([1]).token_ids
    assert asyncio.run(engine.agenerate([1])).token_ids == wanted


def test_an_internal_error_reaches_every_task(hashed, monkeypatch, caplog, drained):
    engine = hashed()
    wanted = hashed().generate([1]).token_ids
    with monkeypatch.context() as broken:
        broken.setattr(engine.core, "step", lambda: 1 / 0)
        with pytest.raises(RunnerError, match="division by zero"):
            asyncio.run(engine.agenerate([1]))
        join_background_thread()
    assert "a step after its last request failed" in caplog.text
    assert asyncio.run(engine.agenerate([1])).token_ids == wanted
    assert is_drained_later(engine, drained)


def test_what_another_thread_cancels_is_drained(hashed, monkeypatch, caplog, drained):
    engine = hashed()
    dispatcher, loop = engine._dispatcher, engine._dispatcher.step_loop
    cancel, cancel_request = loop._cancel, engine.core.cancel
    cancelling, others = threading.Event(), []

    def cancel_elsewhere(handles):
        others.append(threading.Thread(target=dispatcher.cancel, args=(handles,)))
        others[0].start()
        assert cancelling.wait(300)
        cancel(handles)

    def cancel_late(*request):
        cancelling.set()
        # Until the background thread waits for this one, or takes no more work.
        until(lambda: dispatcher.lock.waiters or loop._thread is None)
        return cancel_request(*request)

    with monkeypatch.context() as broken:
        broken.setattr(engine.core, "step", lambda: 1 / 0)
        broken.setattr(engine.core, "cancel", cancel_late)
        broken.setattr(loop, "_cancel", cancel_elsewhere)
        with pytest.raises(RunnerError, match="division by zero"):
            asyncio.run(engine.agenerate([1]))
        others[0].join(300)
        join_background_thread()
    assert "a step after its last request failed" in caplog.text
    assert is_drained_later(engine, drained)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([1] * 500, {}, PromptTooLong),
        ("", {}, RequestError),
        ([1], {"top_p": 7}, RequestError),
        ([1], {"top_q": 7}, RequestError),
        ([[1], [1] * 500], {}, PromptTooLong),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_computed(
    hashed, prompt, options, error
):
    steps = []
    engine = hashed(on_step=steps.append)
    with pytest.raises(error):
        asyncio.run(engine.agenerate(prompt, **options))
    assert not steps


def test_closing_ends_open_requests(hashed):
    engine = hashed(runner=HeldRunner)
    gate = engine.core.runner.gate
    gate.hold_after(3)

    async def main():
        task = asyncio.create_task(engine.agenerate([1], max_tokens=100))
        assert await asyncio.to_thread(gate.is_held.wait, 300)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        # The step that is held has the lock, and closing is the next to have it.
        lock = engine._dispatcher.lock
        await asyncio.to_thread(until, lambda: lock.waiters == 1)
        gate.release()
        await closing
        with pytest.raises(RunnerError, match="closed before the request finished"):
            await task

    asyncio.run(main())


def test_a_step_after_closing_computes_nothing(hashed, caplog):
    """A thread may be about to compute what the last request has left."""
    engine = hashed()
    engine.submit([1], max_tokens=100)
    engine.step()
    engine.close()
    assert engine.core.has_work
    engine.step()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_threads_and_tasks_share_an_engine(hashed, drained):
    alone = hashed()
    wanted = [alone.generate([at], max_tokens=30).token_ids for at in range(8)]
    engine = hashed(runner=SlowRunner)
    found = {}

    def work(at):
        if at % 2:
            found[at] = engine.generate([at], max_tokens=30).token_ids
        else:
            pieces = engine.stream([at], max_tokens=30)
            text = "".join(pieces)
            assert text == alone.tokenizer.decode(wanted[at])
            found[at] = wanted[at]

    async def main():
        threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        calls = [engine.agenerate([at], max_tokens=30) for at in range(4, 8)]
        for at, answer in enumerate(await asyncio.gather(*calls), start=4):
            found[at] = answer.token_ids
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))

    asyncio.run(main())
    assert [found[at] for at in range(8)] == wanted
    assert is_drained_later(engine, drained)


def test_two_event_loops_share_one_engine(hashed):
    alone = hashed()
    wanted = [alone.generate([at], max_tokens=30).token_ids for at in range(2)]
    engine = hashed(runner=SlowRunner)
    found = [None, None]

    def loop(at):
        found[at] = asyncio.run(engine.agenerate([at], max_tokens=30)).token_ids

    threads = [threading.Thread(target=loop, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


def test_a_callback_cannot_call_the_engine_but_may_cancel(hashed, drained):
    seen = []

    def on_step(_record):
        with pytest.raises(RequestError, match="callback of its own step"):
            engine.submit([1])
        engine.cancel(answer)
        seen.append(True)

    engine = hashed(on_step=on_step)
    answer = engine.submit([1, 2], max_tokens=50)
    while not answer.completed:
        engine.step()
    assert seen
    assert answer.finish_reason == "cancelled"
    assert drained(engine)


def test_the_event_loop_is_not_blocked(hashed):
    """No step ends before the event loop has submitted and canceled other calls."""
    engine = hashed(runner=HeldRunner, depth=1)
    gate = engine.core.runner.gate
    gate.hold_after(0)

    async def main():
        task = asyncio.create_task(engine.agenerate([1], max_tokens=4))
        assert await asyncio.to_thread(gate.is_held.wait, 300)
        calls = [asyncio.create_task(engine.agenerate([at])) for at in range(3)]
        await asyncio.to_thread(wait_submitted, engine, 4)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        assert not task.done()
        gate.release()
        return await asyncio.gather(task, *calls, return_exceptions=True)

    first, canceled, *others = asyncio.run(main())
    assert isinstance(canceled, asyncio.CancelledError)
    assert len(first.token_ids) == 4
    assert all(other.token_ids for other in others)


class LateThread(threading.Thread):
    """Returns from ``start`` after its work, and is alive until it is let go."""

    def __init__(self, **options):
        super().__init__(**options)
        self.worked, self.may_end = threading.Event(), threading.Event()

    def start(self):
        super().start()
        assert self.worked.wait(300)

    def run(self):
        super().run()
        self.worked.set()
        assert self.may_end.wait(300)


class OneStep:
    """A handle that finishes in its first step."""

    def __init__(self):
        self.samples, self.finish_reason, self.listener = (self,), None, None

    @property
    def completed(self):
        return self.finish_reason is not None

    def notify(self):
        """Nothing listens."""


def test_a_thread_that_has_finished_is_not_waited_for(monkeypatch):
    threads = []

    def make(**options):
        threads.append(LateThread(**options))
        return threads[-1]

    monkeypatch.setattr(step_loop.threading, "Thread", make)
    queued = []

    def step():
        while queued:
            queued.pop().finish_reason = "length"

    loop = step_loop.AsyncStepLoop(queued.append, step, list, lambda: False)
    handles = [OneStep(), OneStep()]
    for handle in handles:
        batch = Batch()
        batch.add(handle)
        loop.submit(batch)
    for thread in threads:
        thread.may_end.set()
        thread.join(300)
    assert [handle.completed for handle in handles] == [True, True]


def test_a_batch_that_is_queued_whole_is_not_fed_again():
    fed, steps = [], []
    done = threading.Event()

    class Counted(Batch):
        def feed(self, add):
            fed.append(self)
            super().feed(add)

    def step():
        steps.append(None)
        if len(steps) == 5:
            for handle in handles:
                handle.finish_reason = "length"
            done.set()

    loop = step_loop.AsyncStepLoop(lambda _: None, step, list, lambda: False)
    handles = [OneStep() for _ in range(3)]
    batches = [Counted() for _ in handles]
    for batch, handle in zip(batches, handles, strict=True):
        batch.add(handle)
        loop._open[batch] = loop._unfed[batch] = None
    loop.ensure_thread()
    assert done.wait(300)
    assert fed == batches


class Open(OneStep):
    """A handle that never finishes."""

    def fail(self, error):
        self.finish_reason = error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failures", [2, 1000])
def test_a_loop_that_fails_again_and_again_fails_its_requests(failures, monkeypatch):
    threads, steps = [], []
    start = threading.Thread

    def make(**options):
        assert len(threads) < 100
        threads.append(start(**options))
        return threads[-1]

    def after_step():
        steps.append(None)
        if len(steps) <= failures:
            raise ZeroDivisionError
        handle.finish_reason = "length"

    monkeypatch.setattr(step_loop.threading, "Thread", make)
    loop = step_loop.AsyncStepLoop(lambda _: None, lambda: None, list, lambda: False)
    loop.after_step = after_step
    handle, batch = Open(), Batch()
    batch.add(handle)
    loop.submit(batch)
    until(lambda: handle.completed and not any(each.is_alive() for each in threads))
    if failures < step_loop.MOST_FAILURES:
        assert handle.finish_reason == "length"
    else:
        assert isinstance(handle.finish_reason, RunnerError)
        assert len(threads) == step_loop.MOST_FAILURES + 1
    assert not loop._open
