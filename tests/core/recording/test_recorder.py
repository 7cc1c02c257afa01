"""The flight recorder: what it keeps, its file, and a run once more."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inl.engine.core import EngineCore
from inl.errors import ProtocolError, RunnerError, WorkerLost
from inl.protocol.runner import BlockWrites, CacheWrite, Reply
from inl.recording.recorder import STEPS, Recorder
from inl.recording.replay import replay
from inl.recording.trace_file import MAGIC, RunHeader, pack, read_trace
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.message import (
    ADMIT,
    HEADER,
    READ,
    RELEASE,
    ROW_WORD,
    STEP,
    WRITE,
    admit_frame,
    header,
    release_frame,
    transfer_frame,
)
from inl.spec.step import Bucket
from inl.testing.hash_runner import HashRunner
from inl.testing.play import admission, one_step
from outcomes import Outcomes


@pytest.fixture
def record(small, tmp_path):
    """Run requests that come and go; returns the file and what ran."""

    def run(count=30, *, ring=False, limits=None, seed=0, policy=None, **options):
        limits = limits or small(blocks=(14,))
        path = tmp_path / "trace"
        recorder = Recorder(lambda: RunHeader(limits, "hash:0"), None if ring else path)
        engine = EngineCore(
            HashRunner(limits),
            policy or SchedulerConfig(),
            recorder=recorder,
            **options,
        )
        random = Random(seed)
        common = [random.randrange(100) for _ in range(9)]
        for number in range(count):
            draws = number % 2 and not limits.buckets
            engine.add(
                Request(
                    [*common[: random.randint(0, 9)], number % 100],
                    max_tokens=random.randint(1, 15),
                    temperature=0.8 if draws else 0.0,
                    frequency_penalty=0.5 if draws and number % 3 else 0.0,
                    seed=number,
                )
            )
        while engine.has_work:
            for event in engine.step():
                assert event.error is None
        recorder.close()
        if ring:
            recorder.write(path)
        return path, engine, limits

    return run


def test_the_file_holds_all_that_was_said(record):
    path, engine, limits = record()
    items = read_trace(path)
    assert items[0] == RunHeader(limits, "hash:0")
    replies = [each for each in items[1:] if isinstance(each, Reply)]
    kinds = [header(each).kind for each in items[1:] if not isinstance(each, Reply)]
    assert len(replies) == kinds.count(STEP) == engine.stats.steps
    assert [each.step for each in replies] == [*range(1, engine.stats.steps + 1)]
    assert kinds.count(ADMIT) == kinds.count(RELEASE) == 30 + engine.stats.preemptions


def test_the_same_run_once_more(record):
    path, engine, _ = record()
    assert engine.stats.preemptions
    assert engine.stats.prefix_hit_tokens
    found = replay(read_trace(path), HashRunner)
    assert not found.differences
    assert (found.steps, found.rows) == (engine.stats.steps, engine.stats.rows)
    assert found.skipped == 0
    assert found.sequences == 30 + engine.stats.preemptions


def test_frames_are_replayed_word_by_word(record):
    path, _, _ = record(8)
    frames = [each for each in read_trace(path)[1:] if not isinstance(each, Reply)]

    class Watched(HashRunner):
        def submit(self, message):
            assert np.array_equal(message, frames.pop(0))
            super().submit(message)

    assert not replay(read_trace(path), Watched).differences
    assert not frames


def test_a_planted_difference_is_named(record):
    path, _, _ = record(6)
    items = read_trace(path)
    at = next(
        place
        for place, each in enumerate(items)
        if isinstance(each, Reply) and each.step == 7 and len(each.tokens) >= 2
    )
    step, tokens = items[at][:2]
    wrong = tokens.copy()
    wrong[1, 0] = (tokens[1, 0] + 1) % 100
    items[at] = Reply(step, wrong)
    found = replay(items, HashRunner)
    first = found.differences[0]
    assert (first.step, first.row) == (7, 1)
    assert (first.recorded, first.replayed) == (wrong[1, 0], tokens[1, 0])
    frame = next(
        each
        for each in items[1:]
        if not isinstance(each, Reply) and header(each)[1:3] == (STEP, 7)
    )
    assert first.slot == frame[HEADER + (ROW_WORD.uniforms + 1) + ROW_WORD.slot]
    assert len(found.differences) == 1
    assert found.skipped


def test_blocks_of_a_sequence_that_differs_are_not_trusted(small, tmp_path):
    """A chat's second turn shares blocks that its first one filled after a fault."""
    recorder = Recorder(lambda: RunHeader(small()), tmp_path / "trace")
    engine = EngineCore(HashRunner(small()), recorder=recorder)
    turn = None
    for _ in range(2):
        prompt = [1, 2, 3, 4] if turn is None else [*turn.tokens, 5]
        turn = Request(prompt, max_tokens=12)
        engine.add(turn)
        while engine.has_work:
            engine.step()
    assert turn.cached_tokens == 12
    recorder.close()
    items = read_trace(tmp_path / "trace")
    assert not replay(items, HashRunner).differences

    class Faulty(HashRunner):
        """Chooses another token in its third step, and goes on from there."""

        def collect(self):
            reply = super().collect()
            if reply.step == 3:
                self.slots[self.slots_in_use[0]].last ^= 1
                reply.tokens[0] ^= 1
            return reply

    found = replay(items, Faulty)
    assert [(each.step, each.sequence) for each in found.differences] == [(3, 1)]
    assert found.skipped == engine.stats.steps - 3


def test_a_runner_with_a_fault_is_told_apart(record):
    path, _, _ = record(10)

    class Late(HashRunner):
        """Loses its cache at the fifth step."""

        steps = 0

        def collect(self):
            self.steps += 1
            if self.steps == 5:
                self.cells.clear()
            return super().collect()

    found = replay(read_trace(path), Late)
    assert found.differences[0].step >= 5
    sequences = [each.sequence for each in found.differences]
    assert len(sequences) == len(set(sequences))


def test_other_programs_serve_the_same_steps(record):
    path, engine, _ = record()

    class Bucketed(HashRunner):
        def __init__(self, given):
            programs = tuple(Bucket(t, 4, 1, "sample_filtered") for t in (4, 16, 512))
            super().__init__(replace(given, buckets=programs))

    found = replay(read_trace(path), Bucketed)
    assert not found.differences
    assert found.rows == engine.stats.rows


def test_programs_that_do_not_fit_are_an_error(record):
    path, _, _ = record(3)

    def make(given):
        return HashRunner(replace(given, buckets=(Bucket(1, 1, 1, "sample"),)))

    with pytest.raises(ProtocolError, match="fits none of the 1 programs"):
        replay(read_trace(path), make)


def test_the_ring_keeps_the_newest_steps_and_replays_what_it_can(record):
    path, engine, _ = record(700, ring=True)
    assert engine.stats.steps > STEPS + 200
    items = read_trace(path)
    replies = [each for each in items[1:] if isinstance(each, Reply)]
    assert STEPS * 0.6 < len(replies) <= STEPS
    assert replies[-1].step == engine.stats.steps
    found = replay(items, HashRunner)
    assert not found.differences
    assert found.skipped
    assert found.rows > 0.5 * (found.rows + found.skipped)


def test_a_ring_that_begins_in_the_middle_still_finds_a_fault(record):
    path, _, _ = record(700, ring=True)
    items = read_trace(path)
    at = [place for place, each in enumerate(items) if isinstance(each, Reply)][-9]
    step, tokens = items[at][:2]
    items[at] = Reply(step, (tokens + 1) % 100)
    found = replay(items, HashRunner)
    assert {each.step for each in found.differences} == {step}
    assert len(found.differences) == len(tokens)


def test_a_fresh_runner_begins_a_run_of_its_own(record, small, tmp_path):
    limits = small(blocks=(14,))
    other = small(blocks=(20,), slots=4)
    recorder = Recorder(lambda: RunHeader(limits, "a"), tmp_path / "trace")
    runner = HashRunner(limits)
    collect, lives = runner.collect, [6]

    def mortal():
        lives[0] -= 1
        if not lives[0]:
            raise WorkerLost("killed")
        return collect()

    def fresh(error):
        recorder.begin(lambda: RunHeader(other, "b"))
        return HashRunner(other)

    runner.collect = mortal
    engine = EngineCore(runner, recorder=recorder, replace=fresh)
    for number in range(6):
        engine.add(Request(range(number + 3), max_tokens=9))
    while engine.has_work:
        engine.step()
    recorder.close()
    items = read_trace(tmp_path / "trace")
    headers = [each for each in items if isinstance(each, RunHeader)]
    assert [each.device for each in headers] == ["a", "b"]
    found = replay(items, HashRunner)
    assert not found.differences
    assert found.steps < engine.stats.steps, "what was in flight was never answered"
    recorder.write(tmp_path / "ring")
    newest = read_trace(tmp_path / "ring")
    assert newest[0].device == "b"
    again = replay(newest, HashRunner)
    assert not again.differences
    assert 0 < again.steps < found.steps


def test_a_path_that_cannot_be_written(small, tmp_path):
    with pytest.raises(RunnerError, match=r"trace .*cannot be written: Is a dir"):
        Recorder(lambda: RunHeader(small()), tmp_path)
    with pytest.raises(RunnerError, match=r"cannot be written: No such"):
        Recorder(lambda: RunHeader(small())).write(tmp_path / "none" / "trace")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error_of_ours(small, caplog):
    """It ends the trace, and no step."""
    recorder = Recorder(lambda: RunHeader(small()), FULL)
    for _ in range(20_000):
        recorder.add(release_frame(1, groups=1, max_blocks_per_seq=8))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    recorder.begin()
    with pytest.raises(RunnerError, match="No space left"):
        recorder.close()
    recorder.close()
    recorder = Recorder(lambda: RunHeader(small()), FULL)
    with pytest.raises(RunnerError, match="No space left"):
        recorder.close()
    recorder.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "found b'' at the start"),
        (lambda data: b"GGUF" + data, "found b'GGUF"),
        (lambda data: data[:8] + b"\1" + data[9:], "of this version"),
        (lambda data: data[:-3], "cut off"),
        (lambda data: data + b"\3", "cut off"),
        (lambda data: data[:12], "the first record is not a run header"),
        (lambda data: data + struct.pack("<B3xI", 9, 0), "record of kind 9"),
        (lambda data: data + struct.pack("<B3xI", 2, 3) + b"abc", "3 bytes"),
        (lambda data: data + struct.pack("<B3xI", 3, 4) + b"abcd", "reply"),
        (lambda data: data + struct.pack("<B3xI", 1, 2) + b"{}", r"limits: found None"),
    ],
)
def test_bad_files(record, tmp_path, change, words):
    path, _, _ = record(2)
    bad = tmp_path / "bad"
    bad.write_bytes(change(path.read_bytes()))
    with pytest.raises(ProtocolError, match=words) as caught:
        read_trace(bad)
    assert str(bad) in str(caught.value)


def test_no_file(tmp_path):
    for path in (tmp_path / "none", tmp_path, "a\0b"):
        with pytest.raises(ProtocolError, match="cannot be read"):
            read_trace(path)


def test_records_that_contradict_each_other(record, small):
    path, _, _ = record(3)
    items = read_trace(path)
    with pytest.raises(ProtocolError, match="before the first run header"):
        replay(items[1:], HashRunner)
    at = next(n for n, each in enumerate(items) if isinstance(each, Reply))
    short = items[at]._replace(tokens=items[at].tokens[:1])
    with pytest.raises(ProtocolError, match="found 1 rows"):
        replay([*items[:at], short, *items[at + 1 :]], HashRunner)
    with pytest.raises(ProtocolError, match="accepts"):
        replay([RunHeader(small(vocab=3)), *items[1:]], HashRunner)


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Bytes of a short recording, and a place to put changed ones."""
    from inl.protocol.runner import Limits

    limits = Limits(3, (9,), 4, 8, 100)
    folder = tmp_path_factory.mktemp("traces")
    recorder = Recorder(lambda: RunHeader(limits, "hash:0"), folder / "good")
    engine = EngineCore(HashRunner(limits), recorder=recorder)
    for number in range(3):
        engine.add(Request([number, 5], max_tokens=4, temperature=0.3))
    while engine.has_work:
        engine.step()
    recorder.close()
    return (folder / "good").read_bytes(), folder / "bad"


CHANGES = st.lists(
    st.tuples(st.integers(0, 5_000), st.binary(max_size=4), st.integers(0, 4)),
    max_size=4,
)


def test_mutated_files_are_read_replayed_or_refused(sample, depth):
    good, path = sample
    outcomes = Outcomes()

    @settings(max_examples=depth(80, 400))
    @given(CHANGES)
    def check(changes):
        data = bytearray(good)
        for at, new, dropped in changes:
            at %= len(data) + 1
            data[at : at + dropped] = new
        path.write_bytes(data)
        with outcomes.refused_by(RunnerError):
            items = read_trace(path)
            if all(each.limits.max_tokens < 5_000 for each in items if _runs(each)):
                replay(items, HashRunner)

    check()
    outcomes.check()


def _runs(item):
    return isinstance(item, RunHeader)


def test_a_packed_header_is_small(small):
    assert len(MAGIC + pack(RunHeader(small()))) < 400


def test_blocks_that_are_written_one_by_one_are_packed_as_one_frame(small):
    runner = HashRunner(small(vocab=96))
    runner.submit(admission(runner.limits, 1, [1, 2, 3]))
    frame = one_step(runner.limits, [(1, list(range(9)))], step=1, decoding=0)
    runner.submit(frame)
    runner.collect()
    for _ in range(2):
        runner.submit(transfer_frame(READ, 0, [1, 2, 3]))
    write = transfer_frame(WRITE, 0, [5, 4, 7])
    whole = CacheWrite(write, runner.read())
    each = BlockWrites(write, runner.read_blocks(3))
    assert pack(each) == pack(whole)
    assert each.nbytes == whole.nbytes > 0


def test_written_blocks_are_recorded_and_written_again(small, tmp_path):
    """A sequence over blocks that no recorded step has filled is replayed."""
    limits = small(vocab=96)
    source, runner = HashRunner(limits), HashRunner(limits)
    prompt = list(range(9))
    source.submit(admission(limits, 1, [1, 2, 3]))
    source.submit(one_step(limits, [(1, prompt)], step=1, decoding=0))
    first = int(source.collect().tokens[0, 0])
    source.submit(transfer_frame(READ, 0, [1, 2, 3]))
    written = CacheWrite(transfer_frame(WRITE, 0, [5, 4, 7]), source.read())
    recorder = Recorder(lambda: RunHeader(limits, "hash:0"))
    frames = [
        written,
        admit_frame(
            1, [[5, 4, 7, 8]], groups=1, max_blocks_per_seq=limits.max_blocks_per_seq,
            length=len(prompt), last=first,
        ),
        transfer_frame(READ, 0, [4]),
        one_step(limits, [(1, [-1])], step=1, decoding=1),
    ]  # fmt: skip
    runner.write(*written)
    for frame in frames:
        recorder.add(frame)
        if frame is not written:
            runner.submit(frame)
    recorder.add(runner.collect())
    path = tmp_path / "trace"
    recorder.write(path)
    items = read_trace(path)
    outcome = replay(items, HashRunner)
    assert (outcome.rows, outcome.skipped, outcome.differences) == (1, 0, [])
    parts = {"cells": written.parts["cells"]}
    changed = replace(parts["cells"], data=parts["cells"].data ^ 1)
    at = next(i for i, item in enumerate(items) if isinstance(item, CacheWrite))
    items[at] = items[at]._replace(parts={"cells": changed})
    assert len(replay(items, HashRunner).differences) == 1
    items[at] = items[at]._replace(parts={"others": changed})
    outcome = replay(items, HashRunner)
    assert (outcome.rows, outcome.skipped) == (0, 1)
