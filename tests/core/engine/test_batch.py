"""The requests of one call: queued in order, removed in order as they finish."""

from __future__ import annotations

import gc
import weakref

import pytest

from byte_tokens import bytes_as_tokens
from inl.engine.batch import Batch
from inl.engine.request_handle import RequestHandle
from inl.errors import QueueFull, RunnerError
from inl.scheduling.request import Event, Request

TOKENIZER = bytes_as_tokens()
A = TOKENIZER.encode("a")[0]


def handle_of(samples=1):
    first, *others = (
        RequestHandle(Request([0]), TOKENIZER, (), 0.0) for _ in range(samples)
    )
    first.further_samples = tuple(others)
    return first


def batch_of(*counts):
    """A queued batch of prompts with these numbers of samples."""
    batch = Batch()
    for count in counts:
        batch.add(handle_of(count))
    batch.feed(lambda _: None)
    return batch


def finish(handle):
    handle.apply_event(Event(1, A, "length"), 1.0)


def test_prompts_are_removed_in_order_as_they_finish():
    batch = batch_of(1, 1, 1)
    first, second, third = batch.firsts
    finish(second)
    assert not batch.completed
    assert batch.pop_completions() == []
    finish(first)
    assert not batch.completed
    assert [each.text for each in batch.pop_completions()] == ["a", "a"]
    assert batch.handles == batch.firsts == [third]
    finish(third)
    assert batch.completed
    assert len(batch.pop_completions()) == 1
    assert batch.completed


def test_a_prompt_is_removed_once_all_of_its_samples_have_finished():
    batch = batch_of(2, 1)
    handles = list(batch.handles)
    for handle in (handles[0], handles[2]):
        finish(handle)
        assert not batch.completed
        assert batch.pop_completions() == []
    finish(handles[1])
    assert batch.completed
    found = batch.pop_completions()
    assert [len(each.alternatives) for each in found] == [1, 0]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_prompt_and_those_after_it_are_left(failing):
    batch = batch_of(1, 2, 1)
    batch.handles[failing].fail(RunnerError("it is lost"))
    for handle in batch.handles:
        if not handle.completed:
            finish(handle)
    assert batch.completed
    left = batch.firsts[1:]
    assert len(batch.pop_completions()) == 1
    assert batch.firsts == left
    assert batch.pop_completions() == []
    with pytest.raises(RunnerError, match="it is lost"):
        batch.firsts[0].completion()


def test_the_rest_is_queued_after_some_were_removed():
    batch, queued = Batch(), []

    def add(handle):
        if len(queued) == room:
            raise QueueFull("full")
        queued.append(handle)

    handles = [handle_of() for _ in range(5)]
    for handle in handles:
        batch.add(handle)
    room = 2
    batch.feed(add)
    for handle in handles[:2]:
        finish(handle)
    assert not batch.completed
    assert len(batch.pop_completions()) == 2
    assert not batch.is_fed
    room = 5
    batch.feed(add)
    assert queued == handles
    assert batch.is_fed


def test_a_full_queue_is_an_error_only_before_the_first_request():
    batch, queued, room = Batch(), [], 0

    def add(handle):
        if len(queued) == room:
            raise QueueFull("full")
        queued.append(handle)

    for _ in range(2):
        batch.add(handle_of())
    with pytest.raises(QueueFull):
        batch.feed(add)
    room = 1
    batch.feed(add)
    finish(queued[0])
    assert not batch.completed
    assert len(batch.pop_completions()) == 1
    batch.feed(add)  # others have taken the place of the first one
    assert not batch.is_fed
    room = 2
    batch.feed(add)
    assert batch.is_fed


def test_a_handle_is_freed_without_a_garbage_collection():
    gc.disable()
    try:
        freed = weakref.ref(handle_of(samples=2))
        assert freed() is None
    finally:
        gc.enable()
