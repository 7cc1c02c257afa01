"""The everyday calls: pieces of streams, handles, conversations, one text to embed."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from inl.errors import RequestError

PROMPT = [5, 6, 7]


def test_pieces_are_text_with_facts(engines):
    engine = engines()
    options = {"max_tokens": 30, "logprobs": 1, "seed": 2, "temperature": 2.0}
    whole = engine.generate(PROMPT, **options)
    pieces = list(engine.stream(PROMPT, **options))
    assert "".join(pieces) == whole.text
    assert all(isinstance(piece, str) for piece in pieces)
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == whole.logprobs
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason == "length"
    assert pieces[-1].usage[:2] == (len(PROMPT), 30)
    assert pieces[0].usage.completion_tokens == len(pieces[0].token_ids) < 30


def test_pieces_for_asyncio_say_the_same(engines):
    engine = engines()
    options = {"max_tokens": 20, "seed": 2, "temperature": 2.0}

    async def read():
        return [piece async for piece in engine.astream(PROMPT, **options)]

    pieces = asyncio.run(read())
    assert "".join(pieces) == engine.generate(PROMPT, **options).text
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[0].logprobs is None


def test_a_stop_string_is_a_reason_of_its_own_piece(engines):
    engine = engines()
    text = engine.generate(PROMPT, max_tokens=30, seed=1, temperature=2.0).text
    stop = text[6:8]
    options = {"max_tokens": 30, "seed": 1, "temperature": 2.0, "stop": stop}
    pieces = list(engine.stream(PROMPT, **options))
    assert "".join(pieces) == text[: text.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_result_steps_until_the_end(engines):
    engine = engines()
    expected = engine.generate(PROMPT, max_tokens=9)
    handle = engine.submit(PROMPT, max_tokens=9)
    other = engine.submit(PROMPT, max_tokens=5)
    assert handle.result().token_ids == expected.token_ids
    assert handle.result(timeout=0).token_ids == expected.token_ids
    assert other.result().token_ids == expected.token_ids[:5]


def test_result_waits_for_all_samples(engines):
    handle = engines().submit(PROMPT, max_tokens=9, n=3, temperature=1.0)
    assert len(handle.result().alternatives) == 2


def test_result_of_a_handle_of_the_background_thread(engines):
    engine = engines()
    handle = engine.start(PROMPT, listener=None, max_tokens=9)
    assert handle.result(timeout=300).finish_reason == "length"


def test_a_timeout_leaves_the_request_open(engines):
    handle = engines().submit(PROMPT, max_tokens=9)
    with pytest.raises(TimeoutError, match="goes on"):
        handle.result(timeout=0)
    assert not handle.completed
    assert handle.result().finish_reason == "length"


def test_cancel_ends_a_handle_and_its_samples(engines, drained):
    engine = engines()
    handle = engine.submit(PROMPT, max_tokens=80, n=2)
    engine.step()
    handle.cancel()
    assert {each.finish_reason for each in handle.samples} == {"cancelled"}
    assert handle.result().finish_reason == "cancelled"
    handle.cancel()
    assert drained(engine)


def test_a_finished_handle_is_freed_at_once(engines):
    engine = engines()
    handle = engine.submit(PROMPT, max_tokens=3)
    handle.result()
    found = weakref.ref(handle)
    gc.disable()
    try:
        del handle
        assert found() is None
    finally:
        gc.enable()


def test_one_text_is_one_row(engines):
    engine = engines()
    rows = engine.embed(["hello", "a"])
    assert rows.shape == (2, engine.model.config.hidden_size)
    (row,) = engine.embed("hello")
    assert np.allclose(row, rows[0], atol=1e-5)
    (row,) = engine.embed(engine.tokenizer.encode("hello"))
    assert np.allclose(row, rows[0], atol=1e-5)


def test_a_conversation_without_a_template_is_refused(engines):
    with pytest.raises(RequestError, match="has no chat template"):
        engines().generate([{"role": "user", "content": "a"}])
