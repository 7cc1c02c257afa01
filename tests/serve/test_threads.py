"""Threads of the server: whose work waits for whose, and what has ended when."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from http_servers import HashServer
from inl.engine.answers.conversation import Conversation, Gap, Tool
from inl.serve.prompt_threads import LONG, LONG_PROMPTS, is_long
from inl.serve.threads import run_to_end


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_work_of_a_cancelled_caller_has_ended_before_it(pool):
    began, go, ended = threading.Event(), threading.Event(), []

    def work():
        began.set()
        assert go.wait(300)
        ended.append(True)

    async def check():
        caller = asyncio.create_task(run_to_end(pool, work))
        later = asyncio.create_task(run_to_end(pool, lambda: ended.append("later")))
        await asyncio.to_thread(began.wait, 300)
        caller.cancel()
        later.cancel()
        await asyncio.wait([later])  # it had not begun
        await asyncio.sleep(0)
        assert not caller.done()
        go.set()
        await asyncio.wait([caller])
        assert caller.cancelled()
        assert ended == [True]

    asyncio.run(check())
    pool.submit(lambda: None).result()
    assert ended == [True], "what had not begun never does"


def test_results_and_errors_are_those_of_the_work(pool):
    assert asyncio.run(run_to_end(pool, lambda: 3)) == 3
    with pytest.raises(KeyError):
        asyncio.run(run_to_end(pool, {}.popitem))


TEXT = "x" * (LONG + 1)
LONG_ONES = {
    "a text": [TEXT],
    "texts": ["x" * LONG, "xx"],
    "a message": [Conversation([{"role": "user", "content": TEXT}])],
    "parts": [Conversation([{"role": "user", "content": [{"text": TEXT}]}])],
    "messages": [Conversation([{"role": "user", "content": ""}] * LONG)],
    "a tool": [Conversation([], tools=[Tool("f", parameters={"a": [TEXT]})])],
    "a variable": [Conversation([], variables={TEXT: 1})],
    "a gap": [Gap("", "", [("name", TEXT)])],
}


@pytest.mark.parametrize("name", LONG_ONES)
def test_a_long_prompt_is_seen(name):
    assert is_long(LONG_ONES[name])


def test_token_ids_and_few_words_are_no_long_prompt():
    assert not is_long([[1] * LONG, "x" * 100])
    assert not is_long([Conversation([{"role": "user", "content": "Hi"}])])


def test_a_short_prompt_does_not_wait_for_long_ones():
    """Nor do files, adapters and the like, which the event loop's threads do."""
    go = threading.Event()
    with HashServer(max_queue=8) as server:
        held = [LONG_PROMPTS.submit(go.wait, 300) for _ in range(2)]
        try:
            # More words than tokens of the context are refused, once they are counted.
            long = server.begin("POST", "/v1/completions", {"prompt": "a " * LONG})
            body = {"prompt": "a", "max_tokens": 1}
            status, _, answer = server.send("POST", "/v1/completions", body)
            assert status == 200, answer
            assert not long.done()
        finally:
            go.set()
        status, _, answer = long.result(300)
        assert status == 400, answer
        assert all(each.result(300) for each in held)
