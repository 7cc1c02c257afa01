"""Where ranks of a group meet, if their workers may be on other hosts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from inl.errors import DeviceError, RunnerError
from inl.runners.rank_startup import Rendezvous

LOCAL = "127.0.0.1:4000"


def agreed(offers, abandoned=None, seconds=60.0):
    """What each rank agrees to; rank 0 comes last."""
    meeting = Rendezvous(LOCAL)
    abandoned = abandoned or threading.Event()
    with ThreadPoolExecutor(len(offers)) as pool:
        futures = {
            rank: pool.submit(meeting.agree, rank, offers[rank], seconds, abandoned)
            for rank in reversed(range(len(offers)))
        }
        return [futures[rank].result() for rank in range(len(offers))]


@pytest.mark.parametrize(
    ("offers", "address"),
    [
        (["", "", ""], LOCAL),
        (["10.0.0.2:5000", "10.0.0.3:6000", "10.0.0.2:7000"], "10.0.0.2:5000"),
        (["[fd00::2]:5000", "[fd00::3]:5000"], "[fd00::2]:5000"),
        (["127.0.0.1:5000", "127.0.0.1:6000"], "127.0.0.1:5000"),
        (["10.0.0.2:5000", "127.0.0.1:6000"], "10.0.0.2:5000"),
    ],
    ids=str,
)
def test_ranks_meet_at_the_host_of_rank_0(offers, address):
    assert agreed(offers) == [address] * len(offers)


def test_a_host_that_cannot_reach_rank_0_is_named():
    words = r"rank 1 at 10\.0\.0\.3:6000: cannot reach rank 0 at 127\.0\.0\.1:5000"
    with pytest.raises(DeviceError, match=words):
        agreed(["127.0.0.1:5000", "10.0.0.3:6000"])


def test_nobody_waits_for_a_rank_0_that_does_not_start():
    meeting, abandoned = Rendezvous(LOCAL), threading.Event()
    with pytest.raises(RunnerError, match="rank 2: rank 0 has not started"):
        meeting.agree(2, "", 0.2, abandoned)
    abandoned.set()
    with pytest.raises(RunnerError, match="rank 1: rank 0 has not started"):
        meeting.agree(1, "", 600.0, abandoned)
