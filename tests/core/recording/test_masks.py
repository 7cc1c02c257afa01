"""Token masks in traces: recorded, read back and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from inl.engine.core import EngineCore
from inl.errors import ProtocolError
from inl.protocol.token_masks import TokenMasks
from inl.recording.recorder import Recorder
from inl.recording.replay import replay
from inl.recording.trace_file import RunHeader, pack, read_trace
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.testing.hash_runner import HashRunner


@pytest.fixture
def trace(small, tmp_path):
    """A trace of masked and unmasked requests, and the engine that recorded it."""
    limits, path = small(blocks=(14,)), tmp_path / "trace"
    recorder = Recorder(lambda: RunHeader(limits, "hash:0"), path)
    engine = EngineCore(
        HashRunner(limits), SchedulerConfig(token_budget=8), recorder=recorder
    )
    for number in range(12):
        allowed = None if number % 3 else range(number, 60, 7)
        engine.add(
            Request(range(number, number + 9), max_tokens=7, allowed_token_ids=allowed)
        )
    while engine.has_work:
        assert not any(event.error for event in engine.step())
    recorder.close()
    return path, engine


def test_masks_are_recorded_and_replayed(trace):
    path, engine = trace
    items = read_trace(path)
    masks = [item for item in items if isinstance(item, TokenMasks)]
    assert masks
    assert all(words.shape == (4,) for each in masks for words in each.words)
    outcome = replay(items, HashRunner)
    assert not outcome.differences
    assert (outcome.steps, outcome.rows) == (engine.stats.steps, engine.stats.rows)
    assert outcome.skipped == 0


def test_another_mask_samples_another_token(trace):
    items = read_trace(trace[0])
    index = next(i for i, item in enumerate(items) if isinstance(item, TokenMasks))
    words = tuple(np.roll(each, 1) for each in items[index].words)
    items[index] = items[index]._replace(words=words)
    assert replay(items, HashRunner).differences


def test_a_trace_without_its_masks_is_refused(trace):
    items = [i for i in read_trace(trace[0]) if not isinstance(i, TokenMasks)]
    with pytest.raises(ProtocolError, match="found no masks of step"):
        replay(items, HashRunner)


def test_masks_replay_where_earlier_sequences_are_unknown(trace):
    """Rows that cannot be computed are skipped; the others keep their masks."""
    items = read_trace(trace[0])
    outcome = replay([items[0], *items[40:]], HashRunner)
    assert outcome.skipped
    assert outcome.rows
    assert not outcome.differences


def test_damaged_masks_are_refused(trace, tmp_path):
    words = np.arange(4, dtype=np.int32)
    record = pack(TokenMasks(3, (0, 2), (words, words)))
    damaged = bytearray(trace[0].read_bytes() + record)
    damaged[-len(record) + 12] = 9  # the number of masks
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    with pytest.raises(ProtocolError, match="masks of step 3: found 13 words for 9"):
        read_trace(path)
