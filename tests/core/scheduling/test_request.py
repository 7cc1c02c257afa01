from __future__ import annotations

import pytest

from inl.errors import PromptTooLong, RequestError
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.step import Bucket


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "prompt: found no tokens, needs at least one"),
        ({"prompt": [1, -1]}, "prompt[1]: found -1, accepts 0 to 2147483647"),
        ({"prompt": [2**31]}, "prompt[0]: found 2147483648"),
        ({"prompt": [1, 2.5]}, "prompt[1]: 'float' object cannot be interpreted"),
        ({"prompt": "hi"}, "prompt[0]: 'str' object"),
        ({"prompt": 7}, "prompt[0]: 'int' object is not iterable; accepts token ids"),
        ({"stop_ids": frozenset({-2})}, "stop_ids[0]: found -2"),
        ({"max_tokens": 0}, "max_tokens: found 0, accepts 1 and above"),
        ({"max_tokens": "9"}, "max_tokens: found '9', accepts an int"),
        ({"max_tokens": None}, "max_tokens: found None, accepts an int"),
        ({"temperature": -0.5}, "temperature: found -0.5, accepts 0 and above"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"temperature": float("inf")}, "temperature: found inf"),
        ({"temperature": 1e39}, "temperature: found 1e+39"),
        ({"temperature": "hot"}, "temperature: found 'hot'"),
        ({"seed": 1.5}, "seed: found 1.5, accepts an int"),
        ({"adapter": 1}, "adapter_digest: found '' for adapter 1, accepts the digest"),
        ({"adapter": -1}, "adapter: found -1, accepts 0"),
        ({"adapter_digest": "a"}, "adapter_digest: found 'a' for adapter 0"),
        ({"cache_salt": 3}, "cache_salt: found 3, accepts a string"),
        ({"allowed_token_ids": []}, "allowed_token_ids: found no tokens, accepts None"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]: found -1, accepts 0"),
        ({"allowed_token_ids": 5}, "allowed_token_ids[0]: 'int' object is not iter"),
    ],
)
def test_a_bad_field_is_refused_with_its_value(fields, words):
    with pytest.raises(RequestError) as caught:
        Request(**{"prompt": [1], **fields})
    assert words in str(caught.value)


def test_any_iterable_of_whole_numbers_is_a_prompt():
    assert Request(range(3)).prompt == (0, 1, 2)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request(range(32)), PromptTooLong, "found 32 tokens, accepts at most 31"),
        (Request([5, 100]), RequestError, "prompt[1]: found token 100, the vocabulary"),
        (Request([5], temperature=0.5), RequestError, "temperature: found 0.5"),
        (
            Request([5], allowed_token_ids={1, 100}),
            RequestError,
            "allowed_token_ids: found token 100, the vocabulary is 0 to 99",
        ),
    ],
    ids=["too long", "vocabulary", "temperature", "allowed"],
)
def test_a_request_that_can_never_be_served_is_refused(small, request_, error, words):
    scheduler = Scheduler(small(buckets=(Bucket(8, 4),)))
    with pytest.raises(error) as caught:
        scheduler.add(request_)
    assert words in str(caught.value)
    assert len(scheduler.waiting) == 0
    assert request_.id == 0


def test_the_configured_context_is_a_limit(small):
    scheduler = Scheduler(small(), SchedulerConfig(context=10))
    with pytest.raises(PromptTooLong, match="found 10 tokens, accepts at most 9"):
        scheduler.add(Request(range(10)))
    assert scheduler.add(Request(range(9))) == 1


def test_a_request_is_added_once(small):
    scheduler = Scheduler(small())
    request = Request([1])
    scheduler.add(request)
    with pytest.raises(RequestError, match="request 1: was added before"):
        scheduler.add(request)


@pytest.mark.parametrize(
    "field", [{"token_budget": 0}, {"max_rows": 0}, {"context": 1}], ids=str
)
def test_a_config_that_is_too_small_is_refused(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"{name}: found {field[name]}"):
        SchedulerConfig(**field)
