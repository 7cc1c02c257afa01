"""Responses that continue stored ones: the answer is that to the whole input."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from http_servers import HashServer
from inl.serve.api_error import ApiError
from inl.serve.openai import responses_endpoint
from inl.serve.openai.response_store import ResponseStore
from inl.serve.openai.responses_exchange import ResponsesExchange

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
TOOL |= {"strict": False}


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(any_hash_server):
    with client_of(any_hash_server) as client:
        yield client


def ask(client, text, **options):
    options = {"max_output_tokens": 12, "temperature": 0, **options}
    return client.responses.create(model="hash", input=text, **options)


def user(text):
    return {"role": "user", "content": text}


def test_a_response_continues_another_one(client):
    first = ask(client, "Name a river.", instructions="Be brief.")
    second = ask(client, "Another one?", previous_response_id=first.id)
    third = ask(client, [user("And?")], previous_response_id=second.id)
    turns = [user("Name a river."), *(item.model_dump() for item in first.output)]
    turns += [user("Another one?")]
    assert second.output_text == ask(client, turns, store=False).output_text
    assert second.previous_response_id == first.id
    turns += [*(item.model_dump() for item in second.output), user("And?")]
    whole = ask(client, turns, store=False)
    assert third.output_text == whole.output_text
    assert third.usage.input_tokens == whole.usage.input_tokens


def test_instructions_are_of_one_response(client):
    """As OpenAI's: those of the earlier response do not carry over."""
    first = ask(client, "Name a river.", instructions="Be brief.")
    turns = [user("Name a river."), *(item.model_dump() for item in first.output)]
    turns += [user("Why?")]
    for options in ({}, {"instructions": "Be long."}):
        found = ask(client, "Why?", previous_response_id=first.id, **options)
        whole = ask(client, turns, **options)
        assert found.usage.input_tokens == whole.usage.input_tokens
        assert found.output_text == whole.output_text


def test_a_stream_is_stored_before_its_last_event(client):
    stream = ask(client, "Name a river.", stream=True)
    for event in stream:
        if event.type in ("response.completed", "response.incomplete"):
            first = event.response
            found = client.responses.retrieve(first.id)
            assert found.output_text == first.output_text
    again = ask(client, "And?", previous_response_id=first.id, stream=True)
    *_, last = again
    twin = ask(client, "And?", previous_response_id=first.id)
    assert last.response.output_text == twin.output_text


def test_the_result_of_a_call_continues_it(client):
    first = ask(
        client, "Weather?", tools=[TOOL], tool_choice="required", max_output_tokens=200
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    result = {"type": "function_call_output", "call_id": calls[0].call_id}
    result |= {"output": "rain"}
    second = ask(client, [result], previous_response_id=first.id, tools=[TOOL])
    turns = [user("Weather?"), *(item.model_dump() for item in first.output), result]
    whole = ask(client, turns, tools=[TOOL])
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output == whole.output or second.output_text == whole.output_text


def test_a_stored_response_is_read_and_deleted(client):
    first = ask(client, "Name a river.", metadata={"a": "b"})
    found = client.responses.retrieve(first.id)
    assert found == first
    assert found.store is True
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: ask(client, "And?", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            call()


def test_what_is_not_to_be_stored_is_not(client):
    first = ask(client, "Name a river.", store=False)
    assert first.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_ids_cannot_be_guessed_from_others(client):
    """Without keys, all clients are one."""
    first, second = ask(client, "a").id, ask(client, "a").id
    assert len(first.rpartition("_")[2]) == 16
    assert first.rpartition("_")[2] != second.rpartition("_")[2]


@pytest.mark.parametrize("frontends", [0, pytest.param(2, marks=pytest.mark.full)])
def test_each_key_has_responses_of_its_own(frontends):
    with (
        HashServer(api_keys=("a", "b"), frontends=frontends) as server,
        client_of(server, "a") as mine,
        client_of(server, "b") as other,
    ):
        first = ask(mine, "Name a river.")
        for call in (
            lambda: other.responses.retrieve(first.id),
            lambda: other.responses.delete(first.id),
            lambda: ask(other, "And?", previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert mine.responses.retrieve(first.id) == first


def test_a_server_that_stores_none_refuses_by_name():
    with HashServer(stored_responses=0) as server, client_of(server) as client:
        first = ask(client, "Name a river.", store=True)
        assert first.store is False
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, "And?", previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def stored(store, client, name):
    try:
        return asyncio.run(store.get(client, name))
    except ApiError:
        return None


def put(store, client, *names, size=10):
    for name in names:
        asyncio.run(store.put(client, name, b"x" * size))


def test_the_number_of_responses_is_bounded():
    store = ResponseStore(count=3, max_bytes=1000, seconds=60)
    put(store, "a", *"1234")
    assert [stored(store, "a", name) is not None for name in "1234"] == [
        False, True, True, True,
    ]  # fmt: skip


def test_the_client_with_the_most_bytes_loses_its_oldest():
    store = ResponseStore(count=99, max_bytes=100, seconds=60)
    put(store, "a", "1")
    put(store, "b", *"23456789", size=20)
    assert stored(store, "a", "1")
    assert store.total_bytes <= 100
    assert stored(store, "b", "9")
    assert stored(store, "b", "2") is None
    put(store, "b", "large", size=101)
    assert stored(store, "b", "large") is None
    assert stored(store, "b", "9")


def test_the_client_with_the_most_responses_loses_its_oldest():
    """Many small ones of a client take no place of another one's large one."""
    store = ResponseStore(count=4, max_bytes=1000, seconds=60)
    put(store, "a", "large", size=500)
    put(store, "b", *"123456")
    assert stored(store, "a", "large")
    assert [stored(store, "b", name) is not None for name in "123456"] == [
        False, False, False, True, True, True,
    ]  # fmt: skip


def test_a_response_that_is_stored_again_is_counted_once():
    store = ResponseStore(count=4, max_bytes=1000, seconds=60)
    put(store, "a", "1", "1", "1", size=400)
    assert (len(store), store.total_bytes) == (1, 400)


def test_a_large_response_is_read_on_a_thread(hash_server, monkeypatch):
    """Decoding millions of bytes stops the event loop, and all streams."""
    threads = []
    for owner, name in (
        (responses_endpoint, "response_of"),
        (ResponsesExchange, "continue_from"),
    ):
        work = getattr(owner, name)

        def noted(*given, work=work):
            threads.append(threading.current_thread().name)
            return work(*given)

        monkeypatch.setattr(owner, name, noted)
    with client_of(hash_server) as client:
        large = {str(at): "\U0001f600" * 512 for at in range(16)}
        first = ask(client, "a", metadata=large, max_output_tokens=1)
        assert client.responses.retrieve(first.id).metadata == large
        ask(client, "b", previous_response_id=first.id, max_output_tokens=1)
    assert len(threads) == 2
    assert all(name.startswith("inl-bodies") for name in threads), threads


def test_responses_are_forgotten_after_a_time():
    store = ResponseStore(count=3, max_bytes=1000, seconds=-1)
    put(store, "a", "1")
    assert stored(store, "a", "1") is None
    assert (len(store), store.total_bytes) == (0, 0)
