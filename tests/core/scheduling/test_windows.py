"""Cache groups with a window: blocks outside it are freed."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random

import numpy as np
import pytest

from inl.backend.base import DeviceMemory as Bytes
from inl.backend.base import Traits
from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.errors import OutOfMemory, ProtocolError
from inl.executor.cache_sizing import plan_limits
from inl.models import gemma2, mistral
from inl.protocol.frame_check import FrameCheck
from inl.protocol.wire_json import read_limits
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.message import BlockTableUpdate, Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.hash_runner import HashRunner

WINDOW, SIZE = 9, 4
PROMPT = list(range(1, 31))


@pytest.fixture
def two(small):
    """Limits with one group without a window and one with a window of nine tokens."""
    return small(
        blocks=(70, 70), max_blocks_per_seq=32, windows=(None, WINDOW), depth=2
    )


def played(limits, *requests, **policy):
    """The engine after these requests, and the blocks held after each step."""
    engine = EngineCore(HashRunner(limits, lag=Random(1)), SchedulerConfig(**policy))
    answers, held = {}, []
    for request in requests:
        answers[engine.add(request)] = []
        while engine.has_work:
            for number, token, _, error in engine.step():
                assert error is None
                answers[number] += [token] if token is not None else []
            pools = engine.scheduler.kv_cache.pools
            held.append([pool.used_blocks for pool in pools])
    return engine, list(answers.values()), held


@pytest.mark.parametrize("budget", [512, 16, 5, 1])
@pytest.mark.parametrize("cached", [True, False], ids=["prefixes", "none"])
def test_a_long_output_uses_blocks_for_its_window_only(two, answer_of, budget, cached):
    request = Request(PROMPT, max_tokens=80)
    _, (found,), held = played(two, request, token_budget=budget, prefix_cache=cached)
    assert found == answer_of(request, two)
    everything, windowed = np.array(held).T
    assert everything.max() == -(-(30 + 79) // SIZE)
    shown = -(-WINDOW // SIZE)
    # Plus blocks that wait for a step in flight or for room in a frame.
    assert windowed[45:-3].max() <= shown + 2


def test_a_prefix_is_shared_after_blocks_left_the_window(two, answer_of):
    first = Request(PROMPT, max_tokens=40)
    second = Request([*PROMPT, 77], max_tokens=5)
    engine, found, _ = played(two, first, second)
    assert found == [answer_of(first, two), answer_of(second, two)]
    assert second.cached_tokens == 28
    assert engine.stats.prefix_hit_tokens == 28


def test_without_a_cache_no_window_blocks_are_freed(two, answer_of):
    request = Request(PROMPT, max_tokens=20)
    _, (found,), held = played(two, request, use_kv_cache=False)
    assert found == answer_of(request, two)
    assert held[20][0] == held[20][1]


def frame_with(cell, limits):
    rows, bucket = [Row(1, [5])], Bucket(1, 1)
    return step_frame(
        bucket, rows, [cell], step=1, groups=2, block_size=SIZE, decode_rows=0
    )


def admitted(limits):
    tables = [list(range(1, 9)), list(range(9, 17))]
    runner = HashRunner(limits)
    runner.submit(
        admit_frame(
            1, tables, groups=2, max_blocks_per_seq=limits.max_blocks_per_seq, length=20
        )
    )
    return runner


def test_only_blocks_before_a_window_may_be_zero(two):
    admitted(two).submit(frame_with(BlockTableUpdate(1, 1, 0, 0), two))
    with pytest.raises(ProtocolError, match=r"update: found \(0, 1, 0, 0\)"):
        admitted(two).submit(frame_with(BlockTableUpdate(0, 1, 0, 0), two))
    with pytest.raises(ProtocolError, match="group 1: 21 tokens need 6 blocks"):
        admitted(two).submit(frame_with(BlockTableUpdate(1, 1, 3, 0), two))


def test_block_ids_are_checked_per_group(two):
    limits = replace(two, blocks=(70, 20))
    FrameCheck(limits).read(frame_with(BlockTableUpdate(0, 1, 0, 69), limits))
    with pytest.raises(ProtocolError, match="update, block: found 69, accepts 0 to 19"):
        FrameCheck(limits).read(frame_with(BlockTableUpdate(1, 1, 0, 69), limits))
    tables = [[69], [20]]
    with pytest.raises(ProtocolError, match="block: found 20, accepts 0 to 19"):
        FrameCheck(limits).read(
            admit_frame(
                1, tables, groups=2, max_blocks_per_seq=limits.max_blocks_per_seq
            )
        )


def test_windows_cross_the_wire(two):
    value = asdict(two)
    names = ("blocks", "buckets", "windows", "feature_layers")
    value |= {name: list(value[name]) for name in names}  # as JSON has them
    assert read_limits(value, "here") == two
    del value["windows"]  # another release's
    assert read_limits(value, "here") == replace(two, windows=())
    for odd in ([None], [None, 0], 9, [None, "9"]):
        with pytest.raises(ProtocolError, match=r"limits\.windows: found"):
            read_limits({**value, "windows": odd}, "here")


class Room:
    """A backend with nothing but memory and traits."""

    traits = Traits(block_size=16, depth=2)

    def __init__(self, free):
        self.free = free

    def memory(self):
        return Bytes(self.free, self.free)

    def offers(self, kind):
        return None


SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "sliding_window": 64, "head_dim": 8,
}  # fmt: skip
BLOCK = 2 * 2 * 8 * 16 * 4
"""Bytes of a block of one layer: keys and values of two heads in float32."""


def planned(family, **settings):
    config = EngineConfig(max_batch=8, **settings)
    return plan_limits(family.MODEL, family.config(SIZES), Room(1 << 40), config)


def test_a_group_with_a_window_is_planned_smaller():
    limits = planned(gemma2)
    assert limits.windows == (64, None)
    assert limits.max_blocks_per_seq == 64
    assert limits.blocks == (1 + 64 + 7 * 6, 1 + 8 * 64)
    assert limits.max_tokens == 1024


@pytest.mark.parametrize("sequences", [1, 1.5, 3, 7.9])
def test_the_cache_stays_within_its_budget(sequences):
    whole = 4 * BLOCK * 64
    limits = planned(gemma2, cache_bytes=int(sequences * whole))
    spent = sum(2 * BLOCK * (count - 1) for count in limits.blocks)
    assert spent <= sequences * whole
    alike = 1 + int(sequences * 64)
    assert limits.blocks[1] >= alike
    assert spent > sequences * whole - 9 * 4 * BLOCK or limits.blocks[1] == 513
    with pytest.raises(OutOfMemory):
        planned(gemma2, cache_bytes=whole - 1, context=1024)


def test_a_fully_windowed_model_needs_few_blocks():
    limits = planned(mistral)
    assert limits.blocks == (1 + 64 + 7 * 6,)
