"""Repeated steps of a tiny model in NumPy, as one program and as single steps."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.errors import ProtocolError
from inl.executor import repeated_step
from inl.executor.repeated_frames import SingleSteps, without_stopped
from inl.models.llama import MODEL
from inl.protocol.frame_check import FrameCheck
from inl.protocol.frame_decoder import read_step
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.spec.message import (
    BlockTableUpdate,
    Row,
    admit_frame,
    header,
    max_block_table_updates,
    step_frame,
)
from inl.spec.step import NO_TOKEN, Bucket
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from repeated_answers import answers

FILES = MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=4))
VOCAB = 96


def limits(**more):
    return Limits(
        **{
            "slots": 6, "blocks": (40,), "block_size": 4, "max_blocks_per_seq": 16,
            "vocab": VOCAB, **more,
        }
    )  # fmt: skip


def make_runner(loops=True, **more):
    backend = ReferenceBackend(Device("reference:0"))
    runner = local_runner(backend, MODEL, FILES, limits(**more))
    if not loops:
        runner.executor.loops = None
    return runner


def requests():
    """Greedy and sampled ones, with filters and penalties, of different lengths."""
    rng = np.random.default_rng(1)
    return [
        Request(
            [int(token) for token in rng.integers(0, VOCAB, 3 + 2 * at)],
            max_tokens=24 + at,
            temperature=0.8 * (at % 2),
            seed=at,
            ignore_eos=at == 3,
            stop_ids=frozenset({40, 41, 42}) if at == 2 else frozenset(),
            top_k=9 * (at == 3),
            presence_penalty=0.4 * (at == 4),
        )
        for at in range(5)
    ]


EOS = (5, 17)


@pytest.fixture(scope="module")
def plain():
    return answers(make_runner(), requests(), 1, EOS)[0]


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "one by one"])
@pytest.mark.parametrize(("steps", "blocks"), [(2, 40), (8, 40), (5, 27)])
def test_tokens_are_the_same(plain, loops, steps, blocks):
    assert {reason for _, reason in plain} == {"stop", "length"}
    runner = make_runner(loops, decode_steps=steps, blocks=(blocks,))
    found, seen, core = answers(runner, requests(), steps, EOS)
    assert found == plain
    assert sum(record.bucket.repeat > 1 for record in seen) > 2
    if blocks < 40:
        assert core.scheduler.preemptions


def test_a_cancelled_request_changes_no_other(plain):
    runner = make_runner(decode_steps=8)
    found, *_ = answers(runner, requests(), 8, EOS, cancel=(2, 1))
    ids, reason = found[1]
    assert reason == "cancelled"
    assert plain[1][0][: len(ids)] == ids
    assert [*found[:1], *found[2:]] == [*plain[:1], *plain[2:]]


def admitted(runner, count):
    """Admit sequences, each with five blocks of its own and a prompt computed."""
    for slot in range(1, count + 1):
        blocks = [list(range(5 * slot, 5 * slot + 5))]
        runner.submit(admit_frame(slot, blocks, groups=1, max_blocks_per_seq=16))
    rows = [Row(slot, [slot, 7, 9]) for slot in range(1, count + 1)]
    frame = step_frame(
        Bucket(3 * count, count), rows, step=1, groups=1, block_size=4, decode_rows=0
    )
    runner.submit(frame)
    return runner.collect().tokens[:, 0].tolist()


def repeated(rows, *, steps=4, step=2, padding=0):
    bucket = Bucket(len(rows) + padding, len(rows) + padding, repeat=steps)
    return step_frame(
        bucket, rows, step=step, groups=1, block_size=4, decode_rows=len(rows)
    )


def greedy(count):
    """Tokens of three sequences, one step at a time."""
    runner = make_runner()
    found = [admitted(runner, 3)]
    for step in range(2, 2 + count):
        rows = [Row(slot, [-1]) for slot in (1, 2, 3)]
        frame = step_frame(
            Bucket(3, 3), rows, step=step, groups=1, block_size=4, decode_rows=3
        )
        runner.submit(frame)
        found.append(runner.collect().tokens[:, 0].tolist())
    return [list(row) for row in zip(*found, strict=True)]


def test_the_program_ends_when_all_rows_have_stopped(monkeypatch):
    tokens = greedy(5)
    runner, frames = make_runner(decode_steps=8), []
    following = repeated_step.Frames.following

    def watched(self, progress, sampled):
        frames.append(progress.frame.copy())
        return following(self, progress, sampled)

    monkeypatch.setattr(repeated_step.Frames, "following", watched)
    admitted(runner, 3)
    # The first stops at its third token, the second has stopped already, the third
    # has two steps.
    stops = [tokens[0][3]], [tokens[1][0]], []
    rows = [
        Row(slot, [-1], steps=steps, stop_ids=ids)
        for slot, steps, ids in zip((1, 2, 3), (8, 8, 2), stops, strict=True)
    ]
    runner.submit(repeated(rows, steps=8, padding=1))
    first = tokens[0].index(tokens[0][3], 1)
    expected = np.full((4, 8), NO_TOKEN)
    expected[0, :first] = tokens[0][1 : first + 1]
    expected[2, :2] = tokens[2][1:3]
    assert runner.collect().tokens.tolist() == expected.tolist()
    assert len(frames) == max(first, 2)
    check = FrameCheck(runner.limits)
    slots = []
    for frame in frames:
        # Each is a legal frame of the rows that still run.
        assert header(frame).bucket.repeat == 8
        decoded = read_step(frame, header(frame), runner.limits)
        check.read(frame)
        slots.append([row.slot for row in decoded.rows])
    assert slots[0] == slots[1] == [1, 3]
    assert slots[2:] == [[1]] * (first - 2)


def test_a_row_that_stopped_meanwhile_leaves_its_cache_alone():
    tokens = greedy(1)
    runner = make_runner(decode_steps=4)
    admitted(runner, 3)
    before = [part.copy() for part in leaves(runner.executor.state.caches[0])]
    rows = [
        Row(slot, [-1], steps=4, stop_ids=[tokens[slot - 1][0]]) for slot in (1, 2, 3)
    ]
    runner.submit(repeated(rows))
    assert (runner.collect().tokens == NO_TOKEN).all()
    for old, new in zip(before, leaves(runner.executor.state.caches[0]), strict=True):
        assert np.array_equal(old, new)
    assert runner.executor.state.tables.lengths[1:4].tolist() == [3, 3, 3]


@st.composite
def frames(draw):
    """A frame of a repeated step whose rows need blocks, and its limits."""
    size, steps = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(2, 9))
    count, groups = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, 2))
    programs = draw(st.booleans())
    rng = Random(draw(st.integers(0, 99)))
    starts = [rng.randrange(3 * size) for _ in range(count)]
    rows, updates, needs = [], [], []
    for slot, start in enumerate(starts, start=1):
        number = rng.randint(1, steps)
        uniforms = [rng.randrange(256) / 256 for _ in range(number)]
        rows.append(Row(slot, [-1 if rng.random() < 0.5 else 3], uniforms, (), number))
        owned = -(-start // size)
        for entry in range(owned, -(-(start + number) // size)):
            for group in range(groups):
                updates.append(BlockTableUpdate(group, slot, entry, 1 + len(updates)))
                needs.append((updates[-1], max(entry * size - start, 0)))
    bucket = Bucket(count + padding, count + padding, repeat=steps)
    room = max_block_table_updates(bucket, groups=groups, block_size=size)
    for slot in range(1, count + 1):  # blocks that have left a window
        if len(updates) + groups <= room and starts[slot - 1] >= size:
            updates += [BlockTableUpdate(group, slot, 0, 0) for group in range(groups)]
    single = bucket._replace(repeat=1)
    found = limits(
        blocks=(99,) * groups, block_size=size, max_blocks_per_seq=40,
        windows=(1,) * groups, buckets=(single, bucket) if programs else (),
    )  # fmt: skip
    frame = step_frame(
        bucket, rows, updates, step=4, groups=groups, block_size=size,
        decode_rows=count,
    )  # fmt: skip
    return frame, found, rows, updates, needs


@examples(40, 300)
@given(frames())
def test_single_steps_are_legal_frames_with_each_block_in_time(case):
    frame, found, rows, updates, needs = case
    head = header(frame)
    decoded = read_step(frame, head, found)
    assert [row.steps for row in decoded.rows] == [row.steps for row in rows]
    singles, sent = SingleSteps(frame, head, found), []
    assert singles.count == max(row.steps for row in rows)
    for step in range(singles.count):
        bucket, single, kept = singles.frame(step)
        assert not found.buckets or bucket in found.buckets
        part = read_step(single, header(single), found)
        sent += part.updates
        running = [at for at, row in enumerate(rows) if row.steps > step]
        assert kept.tolist() == running
        for at, row in zip(running, part.rows, strict=True):
            bits = np.float32(rows[at].uniforms[step]).view(np.int32)
            assert (row.slot, row.uniforms) == (rows[at].slot, [bits])
            assert row.tokens == ([-1] if step else list(rows[at].tokens))
        due = [update for update, need in needs if need <= step]
        assert all(update in sent for update in due)
    assert set(sent) <= set(updates)
    assert len(sent) == len(set(sent))


def test_tokens_after_a_stop_are_removed():
    rows = [
        Row(1, [-1], steps=4, stop_ids=[8, 0]),
        Row(2, [-1], steps=4),
        Row(3, [-1], steps=4, stop_ids=[5]),
    ]
    frame = repeated(rows, padding=1)
    tokens = np.array(
        [[7, 0, 3, 3], [8, 0, -1, 4], [5, 1, 2, 3], [NO_TOKEN] * 4], np.int32
    )
    found = without_stopped(tokens, frame, header(frame), limits())
    gone = NO_TOKEN
    assert found.tolist() == [
        [7, 0, gone, gone], [8, 0, -1, gone], [5, gone, gone, gone], [gone] * 4,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (Row(1, [-1], steps=5), "steps of a row: found 5, accepts 0 to 4"),
        (Row(1, [-1], steps=0), "steps of a row: found 0 and a token"),
        (Row(1, [-1], steps=2, stop_ids=[VOCAB]), "stop id of a row, plus 1: found 97"),
        (Row(1, [-1], steps=-1), "steps of a row: found -1"),
    ],
)
def test_a_bad_row_is_named(row, sentence):
    runner = make_runner(decode_steps=4)
    runner.submit(admit_frame(1, [[1, 2]], groups=1, max_blocks_per_seq=16))
    with pytest.raises(ProtocolError, match=sentence):
        runner.submit(repeated([row]))


def test_more_stop_ids_than_a_row_holds():
    with pytest.raises(ProtocolError, match="stop ids of a row: found 9"):
        repeated([Row(1, [-1], stop_ids=range(9))])


MANY = frozenset(range(30, 42))
"""More stop ids than a row of a frame has by default."""


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "one by one"])
def test_a_runner_may_have_room_for_more_stop_ids(loops):
    def many():
        return [
            Request([7, at], max_tokens=7, stop_ids=MANY, temperature=0.9, seed=at)
            for at in range(5)
        ]

    plain, _, _ = answers(make_runner(), many(), 1, EOS)
    assert {reason for _, reason in plain} == {"stop", "length"}
    found, seen, _ = answers(make_runner(loops, decode_steps=8), many(), 8, EOS)
    assert found == plain
    assert {record.bucket.repeat for record in seen} == {1}
    runner = make_runner(loops, decode_steps=8, stop_ids=16)
    found, seen, _ = answers(runner, many(), 8, EOS)
    assert found == plain
    repeated_ones = {r.bucket.stop_ids for r in seen if r.bucket.repeat > 1}
    assert repeated_ones == {16}


def test_a_frame_with_other_stop_ids_than_the_runner_is_refused():
    bucket = Bucket(tokens=1, rows=1, repeat=4, stop_ids=12)
    row = Row(1, [-1], steps=2, stop_ids=range(12))
    frame = step_frame(bucket, [row], step=2, groups=1, block_size=4, decode_rows=1)
    assert header(frame).bucket == bucket
    for read in (
        lambda: FrameCheck(limits(decode_steps=4)).read(frame),
        lambda: read_step(frame, header(frame), limits(decode_steps=4)),
    ):
        with pytest.raises(ProtocolError, match=r"(found 12.* accepts 8)|(found 12)"):
            read()
    wide = limits(decode_steps=4, stop_ids=12)
    (read_row,) = read_step(frame, header(frame), wide).rows
    assert read_row.stop_ids == tuple(range(12))
