"""HashRunner by hand-made frames: what it computes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from inl.errors import ProtocolError, RunnerError
from inl.protocol.runner import AdapterSource
from inl.scheduling.request import Request
from inl.spec.message import (
    HEADER,
    MASKED,
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    layout,
    release_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.step import Bucket
from inl.testing.hash_runner import HashRunner


@pytest.fixture
def frames(small):
    class Frames:
        limits = small(vocab=40, depth=2)
        shape = {"groups": 1, "max_blocks_per_seq": 8}  # noqa: RUF012

        def admit(self, slot=1, blocks=(1, 2), **fields):
            return admit_frame(slot, [blocks], **self.shape, **fields)

        def release(self, slot=1):
            return release_frame(slot, **self.shape)

        def step(self, number, *rows, cells=(), bucket=None, decode_rows=0, flags=0):
            rows = [row if isinstance(row, Row) else Row(*row) for row in rows]
            tokens = sum(len(row.tokens) for row in rows)
            return step_frame(
                bucket or Bucket(tokens, len(rows)),
                rows,
                [BlockTableUpdate(*cell) for cell in cells],
                step=number,
                groups=1,
                block_size=4,
                decode_rows=decode_rows,
                flags=flags,
            )

    return Frames()


def said(runner, *messages):
    for message in messages:
        runner.submit(message)
    return runner


@pytest.mark.parametrize("lag", [None, Random(3)], ids=["in order", "lagging"])
def test_prompts_and_feedback_give_the_text_that_the_ids_decide(frames, answer_of, lag):
    runner = said(
        HashRunner(frames.limits, lag=lag),
        frames.admit(blocks=(3, 1)),
        frames.step(1, (1, [5, 6, 7])),
        frames.step(2, (1, [-1]), decode_rows=1),
    )
    tokens = [int(runner.collect().tokens[0, 0]) for _ in range(2)]
    assert tokens == answer_of(Request([5, 6, 7], max_tokens=2), frames.limits)


def test_a_changed_cell_takes_effect_with_its_step(frames, answer_of):
    runner = said(
        HashRunner(frames.limits),
        frames.admit(blocks=(3,)),
        frames.step(1, (1, [5, 6, 7, 8])),
        frames.step(2, (1, [-1]), cells=[(0, 1, 1, 8)]),
    )
    tokens = [int(runner.collect().tokens[0, 0]) for _ in range(2)]
    assert tokens == answer_of(Request([5, 6, 7, 8], max_tokens=2), frames.limits)


def test_cached_tokens_are_read_and_not_computed(frames, answer_of):
    runner = said(
        HashRunner(frames.limits),
        frames.admit(slot=1, blocks=(3, 1)),
        frames.step(1, (1, [5, 6, 7, 8])),
        frames.release(1),
        frames.admit(slot=2, blocks=(3, 4), length=4),
        frames.step(2, (2, [9])),
    )
    runner.collect()
    wanted = answer_of(Request([5, 6, 7, 8, 9], max_tokens=1), frames.limits)
    assert runner.collect().tokens[0].tolist() == wanted
    assert runner.slots_in_use == [2]


def test_an_adapter_and_a_uniform_change_the_text(frames):
    drawn = []
    limits = replace(frames.limits, adapters=2)
    for adapter, digest, uniform in (
        (0, "a", 0.25), (1, "a", 0.25), (1, "b", 0.25), (2, "a", 0.25), (0, "a", 0.5),
    ):  # fmt: skip
        runner = HashRunner(limits)
        runner.load_adapter(AdapterSource(max(adapter, 1), "folder", digest))
        said(
            runner,
            frames.admit(adapter=adapter, temperature=1.0),
            frames.step(1, (1, range(5), [uniform]), bucket=Bucket(5, 1, 1, "sample")),
        )
        drawn.append(int(runner.collect().tokens[0, 0]))
    assert drawn[1] == drawn[3], "the digest counts, not the number"
    assert len(set(drawn)) == 4


def test_an_adapter_that_is_not_loaded_is_refused(frames):
    runner = HashRunner(replace(frames.limits, adapters=2))
    runner.load_adapter(AdapterSource(2, "folder", "a"))
    with pytest.raises(
        ProtocolError, match=r"adapter 1 is not loaded; loaded are \[2\]"
    ):
        runner.submit(frames.admit(adapter=1))
    with pytest.raises(ProtocolError, match="found number 3, accepts 1 to 2"):
        runner.load_adapter(AdapterSource(3, "folder", "a"))
    with pytest.raises(RunnerError, match="no room for adapters; set EngineConfig"):
        HashRunner(frames.limits).load_adapter(AdapterSource(1, "folder", "a"))


def answers(frames, *, marks=(), steps=2, **fields):
    """Tokens after a prompt in a full program."""
    runner = said(HashRunner(frames.limits), frames.admit(**fields))
    if marks:
        runner.submit(token_bias_frame(1, marks))
    for number in range(1, steps + 1):
        row = (1, [-1] if number > 1 else [5, 6, 7], [0.25])
        bucket = Bucket(len(row[1]), 1, 1, "sample_filtered")
        said(runner, frames.step(number, row, bucket=bucket, decode_rows=number > 1))
        tokens = runner.collect().tokens[0].tolist()
    return tokens


def test_every_parameter_count_and_bias_changes_the_text(frames):
    hot = {"temperature": 0.5, "repetition_penalty": 1.5}
    held = [TokenBias(5, 1), TokenBias(8, 4)]
    kinds = [
        {},
        {"temperature": 0.5},
        *({**hot, "marks": each} for each in (held, held[:1], [TokenBias(5, 1, 2.0)])),
        *(
            {**hot, "marks": held, name: value}
            for name, value in (
                ("top_k", 3), ("top_p", 0.5), ("min_p", 0.1),
                ("presence_penalty", 0.5), ("frequency_penalty", -0.5),
            )
        ),
    ]  # fmt: skip
    texts = {tuple(answers(frames, steps=4, **fields)) for fields in kinds}
    # Of 40 tokens, two texts may agree by chance, but hardly five.
    assert len(texts) > len(kinds) - 4
    assert answers(frames, **hot, marks=held) != answers(frames, **hot)


def test_full_programs_tell_scores_and_others_none(frames):
    for sampler in ("sample_filtered", "sample"):
        runner = said(
            HashRunner(frames.limits),
            frames.admit(),
            frames.step(1, (1, [5]), bucket=Bucket(1, 1, 1, sampler)),
        )
        reply = runner.collect()
        if sampler == "sample":
            assert reply.scores is None
            continue
        token = int(reply.tokens[0, 0])
        chosen, ids, values = reply.scores
        assert chosen.tolist() == [-token / 4]
        assert ids[0].tolist() == [(token + step) % 40 for step in range(20)]
        assert values[0].tolist() == [-index / 4 for index in ids[0]]


@pytest.mark.parametrize(
    ("word", "value", "words"),
    [
        (HEADER, 0, "token biases of slot 0"),
        (HEADER, 2, "slot 2: is not admitted"),
        (HEADER + 1, 257, "found 257 entries, accepts up to 256"),
        (HEADER + 1, -1, "found -1 entries"),
        (HEADER + 1, 1, "padding: found a nonzero word"),
        (HEADER + 2, 40, "accepts tokens up to 39"),
        (HEADER + 2, 9, "found a token twice"),
        (HEADER + 3, -1, "counts from 0"),
        (HEADER + 4, 0x7F8 << 20, "finite biases"),
    ],
)
def test_marks_that_cannot_be_are_refused(frames, word, value, words):
    frame = token_bias_frame(1, [TokenBias(8, 2, 0.5), TokenBias(9, 1)])
    frame[word] = value
    runner = said(HashRunner(frames.limits), frames.admit())
    with pytest.raises(ProtocolError) as caught:
        runner.submit(frame)
    assert words in str(caught.value)


def test_marks_come_before_tokens_and_to_full_runners_only(frames, small):
    runner = said(
        HashRunner(frames.limits, lag=Random(0)),
        frames.admit(),
        frames.step(1, (1, [1]), bucket=Bucket(1, 1, 1, "sample_filtered")),
    )
    with pytest.raises(
        ProtocolError, match="token biases of slot 1: found after a step"
    ):
        runner.submit(token_bias_frame(1, [TokenBias(3, 1)]))
    runner = said(HashRunner(small(vocab=40, sampler="sample")), frames.admit())
    with pytest.raises(ProtocolError, match="sample_filtered, found sample"):
        runner.submit(token_bias_frame(1, [TokenBias(3, 1)]))


def test_a_masked_step_chooses_among_what_is_allowed(frames):
    runner = said(
        HashRunner(frames.limits),
        frames.admit(),
        frames.step(1, (1, [5]), flags=MASKED),
    )
    with pytest.raises(ProtocolError, match="step 1 waits for its masks"):
        runner.collect()
    runner.sample(1, np.array([[1 << 7, 1 << 4]], np.int32))
    runner.submit(frames.step(2, (1, [-1])))
    first, second = runner.collect(), runner.collect()
    assert first.tokens[0, 0] in (7, 36)
    plain = said(
        HashRunner(frames.limits),
        frames.admit(),
        frames.step(1, (1, [5, int(first.tokens[0, 0])])),
    )
    assert second.tokens[0, 0] == plain.collect().tokens[0, 0]


@pytest.mark.parametrize(
    ("step", "masks", "words"),
    [
        (2, [[-1, -1]], "sample: step 2 does not wait for masks"),
        (1, [[-1]], "found int32 [1, 1], accepts int32 [1, 2]"),
        (1, [[0, 1 << 8]], "step 1, row 0: allow no token"),
    ],
)
def test_bad_masks_are_refused(frames, step, masks, words):
    runner = said(
        HashRunner(frames.limits),
        frames.admit(),
        frames.step(1, (1, [5]), flags=MASKED),
    )
    with pytest.raises(ProtocolError) as caught:
        runner.sample(step, np.array(masks, np.int32))
    assert words in str(caught.value)


def test_the_frame_is_the_callers_again_after_submit(frames, answer_of):
    runner = said(HashRunner(frames.limits, lag=Random(0)), frames.admit())
    frame = frames.step(1, (1, [5, 6]))
    runner.submit(frame)
    frame[:] = 0
    wanted = answer_of(Request([5, 6], max_tokens=1), frames.limits)
    assert runner.collect().tokens[0].tolist() == wanted


def test_no_more_steps_than_depth_and_none_without_one(frames):
    runner = said(HashRunner(frames.limits), frames.admit())
    with pytest.raises(ProtocolError, match="collect: no step is in flight"):
        runner.collect()
    said(runner, frames.step(1, (1, [1])), frames.step(2, (1, [-1])), frames.release(1))
    said(runner, frames.admit())
    with pytest.raises(ProtocolError, match="2 steps are in flight, the limit is 2"):
        runner.submit(frames.step(3, (1, [-1])))


def test_a_closed_runner_says_so(frames):
    runner = HashRunner(frames.limits)
    runner.close()
    runner.close()
    for use in (lambda: runner.submit(frames.admit()), runner.collect):
        with pytest.raises(RunnerError, match="is closed"):
            use()


BAD_STEPS = {
    "slot 0": ([(0, [1])], {}, "row 0, slot: found 0, accepts 1 to 4"),
    "slot beyond": ([(5, [1])], {}, "row 0, slot: found 5, accepts 1 to 4"),
    "not admitted": ([(2, [1])], {}, "slot 2: is not admitted; admitted are [1]"),
    "slot twice": ([(1, [1]), (1, [2])], {}, "slots: found [1, 1]"),
    "empty row": ([(1, [])], {"bucket": Bucket(1, 1)}, "row 0, tokens: found 0"),
    "no rows": ([], {"bucket": Bucket(1, 1)}, "tokens of all rows: found 0"),
    "token": ([(1, [40])], {}, "row 0, token: found 40, accepts up to 39"),
    "below -1": ([(1, [-2])], {}, "row 0, least token: found -2"),
    "late feedback": ([(1, [1, -1])], {}, "row 0, least token: found -1"),
    "wide decode": ([(1, [1, 2])], {"decode_rows": 1}, "row 0, tokens: found 2"),
    "decode rows": ([(1, [1])], {"decode_rows": 2}, "(decode_rows): found 2"),
    "uniform 1": ([(1, [1], [1.0])], {}, "row 0, bits of uniforms: found [1065353216]"),
    "uniform below": ([(1, [1], [-0.5])], {}, "row 0, bits of uniforms: found [-1"),
    "cell block 0": (
        [(1, [1])],
        {"cells": [(0, 1, 1, 0)]},
        "block table update: found (0, 1, 1, 0)",
    ),
    "cell block": (
        [(1, [1])],
        {"cells": [(0, 1, 1, 9)]},
        "block table update: found (0, 1, 1, 9)",
    ),
    "cell index": (
        [(1, [1])],
        {"cells": [(0, 1, 8, 1)]},
        "block table update: found (0, 1, 8, 1)",
    ),
    "cell group": (
        [(1, [1])],
        {"cells": [(1, 1, 1, 1)]},
        "block table update: found (1, 1, 1, 1)",
    ),
    "cell slot": ([(1, [1])], {"cells": [(0, 3, 1, 1)]}, "slot 3: is not admitted"),
    "no block": ([(1, range(9))], {}, "slot 1, group 0: 9 tokens need 3 blocks"),
    "no room": ([(1, [1] * 33)], {}, "slot 1, group 0: 33 tokens need 9 blocks"),
    "width": (
        [(1, [1])],
        {"bucket": Bucket(3, 1, 2)},
        "tokens per row: found 2, accepts 1",
    ),
    "too many drafts": (
        [(1, [-1, -2, -2])],
        {"bucket": Bucket(4, 2, 2), "decode_rows": 1},
        "row 0, tokens: found 3, accepts 1 to 2",
    ),
    "draft in place": (
        [(1, [-1, 5])],
        {"bucket": Bucket(2, 1, 2), "decode_rows": 1},
        "row 0, tokens: found [-1, 5], accepts -2 after the first",
    ),
    "prompt beside drafts": (
        [(1, [4])],
        {"bucket": Bucket(1, 1, 2)},
        "decoding rows: found 0, accepts 1, all rows",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_step_that_cannot_be_is_refused(frames, name):
    rows, fields, words = BAD_STEPS[name]
    runner = said(HashRunner(frames.limits), frames.admit())
    with pytest.raises(ProtocolError) as caught:
        runner.submit(frames.step(1, *rows, **fields))
    assert words in str(caught.value)


def test_a_drawing_row_needs_a_drawing_program(frames):
    runner = said(HashRunner(frames.limits), frames.admit(temperature=0.5))
    with pytest.raises(ProtocolError, match=r"row 0: needs a sample program"):
        runner.submit(frames.step(1, (1, [1])))


def test_only_programs_that_exist_are_run(frames, small):
    runner = said(HashRunner(small(buckets=(Bucket(4, 2),))), frames.admit())
    with pytest.raises(
        ProtocolError, match=r"bucket: found \(1, 1, 1, 'greedy', 1, 8, 0\)"
    ):
        runner.submit(frames.step(1, (1, [1])))
    runner.submit(frames.step(1, (1, [1]), bucket=Bucket(4, 2)))


def test_steps_are_numbered_in_turn(frames):
    runner = said(HashRunner(frames.limits), frames.admit(), frames.step(1, (1, [1])))
    with pytest.raises(ProtocolError, match="step 3: follows step 1"):
        runner.submit(frames.step(3, (1, [1])))


@pytest.mark.parametrize("part", ["header", "rows", "updates", "tokens"])
def test_padding_is_zero(frames, part):
    frame = frames.step(1, (1, [1, 2]), bucket=Bucket(4, 2))
    place = layout(Bucket(4, 2), groups=1, block_size=4)
    ends = {
        "header": HEADER,
        "rows": place.updates,
        "updates": place.tokens,
        "tokens": 0,
    }
    frame[ends[part] - 1] = 1
    runner = said(HashRunner(frames.limits), frames.admit())
    said_so = "a reserved word" if part == "header" else f"padding of {part}"
    with pytest.raises(ProtocolError, match=said_so):
        runner.submit(frame)


@pytest.mark.parametrize(
    ("word", "value", "words"),
    [
        (HEADER, 0, "admission to slot 0, slot: found 0, accepts 1 to 4"),
        (HEADER, 5, "slot: found 5"),
        (HEADER + 1, 33, "length: found 33, accepts 0 to 32"),
        (HEADER + 1, -1, "length: found -1"),
        (HEADER + 1, 9, "slot 1, group 0: 9 tokens need 3 blocks"),
        (HEADER + 2, 40, "last token: found 40, accepts 0 to 39"),
        (HEADER + 3, -1, "adapter: found -1"),
        (HEADER + 4, -(1 << 23), "temperature: found -inf"),
        (HEADER + 4, (0x7F8 << 20) + 1, "temperature: found nan"),
        (HEADER + 7, 0x7F8 << 20, "min_p: found inf, accepts 0 and more"),
        (HEADER + 9, -(1 << 23), "presence_penalty: found -inf, accepts finite"),
        (HEADER + 11, 9, "group 0: found blocks 0 to 9, accepts 0 to 8"),
        (HEADER + 11, -3, "group 0: found blocks -3 to 2"),
    ],
)
def test_an_admission_that_cannot_be_is_refused(frames, word, value, words):
    frame = frames.admit()
    frame[word] = value
    with pytest.raises(ProtocolError) as caught:
        HashRunner(frames.limits).submit(frame)
    assert words in str(caught.value)


def test_frames_of_another_size_are_refused(frames):
    runner = said(HashRunner(frames.limits), frames.admit())
    for frame in (
        frames.admit()[:-1],
        frames.step(1, (1, [1]))[:-1],
        frames.admit()[:9],
    ):
        with pytest.raises(ProtocolError, match="words"):
            runner.submit(frame)


def test_a_slot_that_nobody_has_cannot_be_released(frames):
    with pytest.raises(ProtocolError, match="slot 3 is not admitted"):
        HashRunner(frames.limits).submit(frames.release(3))


def test_random_words_are_refused_by_name_or_run(frames):
    """Whatever the words, nothing but ProtocolError comes out."""
    random = Random(1)
    refused = 0
    for _ in range(3_000):
        runner = said(HashRunner(frames.limits), frames.admit())
        frame = random.choice(
            [frames.admit(), frames.step(1, (1, [1, 2]), cells=[(0, 1, 1, 2)])]
        )
        for _ in range(random.randint(1, 3)):
            value = random.choice([-1, 0, 1, 2, 9, 2**31 - 1, -(2**31)])
            frame[random.randrange(len(frame))] = value
        try:
            runner.submit(frame)
        except ProtocolError:
            refused += 1
    assert 1_000 < refused < 3_000
