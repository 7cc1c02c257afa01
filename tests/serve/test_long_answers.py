"""Long parts of answers are written beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from inl.scheduling.sampling_params import TokenLogprob
from inl.serve.http_messages import SHORT_ANSWER, written
from inl.serve.job import Delta


@pytest.mark.parametrize(
    ("delta", "is_long"),
    [
        (Delta("a", token_ids=[1]), False),
        (Delta("a", token_ids=[1] * (SHORT_ANSWER + 1)), True),
        (Delta("a", [], [], [1] * 30, [TokenLogprob(1, -1.0, ((1, -1.0),) * 20)] * 30),
         True),
    ],
    ids=["short", "tokens", "logprobs"],
)  # fmt: skip
def test_long_parts_of_answers_are_written_on_a_thread(delta, is_long):
    ran = asyncio.run(written([delta], threading.current_thread))
    assert (ran is not threading.current_thread()) == is_long
