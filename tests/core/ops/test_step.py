"""Steps and admissions against a plain re-implementation with dicts and loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inl.ops.step import admit, empty_tables, make_step, set_token_bias
from inl.spec.message import (
    DRAFT,
    MAX_TOKEN_BIASES,
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    max_block_table_updates,
    release_frame,
    step_frame,
    token_bias_frame,
)
from inl.spec.step import NEUTRAL, PARAMS, Bucket

SLOTS, WIDTH, BLOCK = 6, 5, 4
blocks = st.integers(1, 99)
tokens = st.integers(0, 500)


@st.composite
def worlds(draw):
    """Tables as dicts, a bucket, and rows and table updates of a matching step."""
    groups = draw(st.integers(1, 2))
    width = draw(st.integers(1, 3))
    table = {
        (group, slot, place): draw(blocks)
        for group in range(groups)
        for slot in range(1, SLOTS)
        for place in range(WIDTH)
    }
    lengths = {slot: draw(st.integers(0, 8)) for slot in range(1, SLOTS)}
    last = {slot: draw(tokens) for slot in range(1, SLOTS)}
    adapters = {slot: draw(st.integers(0, 3)) for slot in range(1, SLOTS)}
    slots = draw(st.lists(st.sampled_from(range(1, SLOTS)), unique=True, max_size=4))
    rows = [
        Row(
            slot, draw(st.lists(st.one_of(st.just(-1), tokens), min_size=1, max_size=9))
        )
        for slot in slots
    ]
    if width > 1:
        drafted = st.lists(st.just(DRAFT), max_size=width - 1)
        rows = [row._replace(tokens=row.tokens + draw(drafted)) for row in rows]
    numbers = st.floats(0, 1, width=32)
    rows = [
        row._replace(
            uniforms=[draw(numbers) for _ in range(2 * width - 1)],
            drafts=[draw(tokens) for _ in range(2 * width - 2)],
        )
        for row in rows
    ]
    bucket = Bucket(
        max(1, sum(len(row.tokens) for row in rows)) + draw(st.integers(0, 3)),
        max(1, len(rows)) + draw(st.integers(0, 2)),
        width,
    )
    place = st.tuples(
        st.integers(0, groups - 1), st.integers(1, SLOTS - 1), st.integers(0, WIDTH - 1)
    )
    room = max_block_table_updates(bucket, groups=groups, block_size=BLOCK)
    changed = draw(st.dictionaries(place, blocks, max_size=room))
    return groups, table, lengths, last, adapters, bucket, rows, changed


def as_tables(groups, table, lengths, last, adapters):
    arrays = empty_tables(groups=groups, slots=SLOTS, max_blocks_per_seq=WIDTH)
    for key, block in table.items():
        arrays.blocks[key] = block
    for slot in range(1, SLOTS):
        arrays.lengths[slot] = lengths[slot]
        arrays.last[slot] = last[slot]
        arrays.adapters[slot] = adapters[slot]
    return arrays


def plainly(groups, table, lengths, last, adapters, bucket, rows, changed):
    """The expected step, computed token by token."""
    table = {**table, **changed}
    lengths = dict(lengths)
    expected = {name: [] for name in ("tokens", "positions", "rows")}
    writes = [[] for _ in range(groups)]
    starts, after, samples, uniforms = [0], [], [], []
    width = bucket.tokens_per_row
    verifies = width > 1 and bucket.tokens <= bucket.rows * width
    for index, row in enumerate(rows):
        first = lengths[row.slot]
        for offset, token in enumerate(row.tokens):
            position = first + offset
            ids = {-1: last[row.slot]}
            if token == DRAFT:
                ids[DRAFT] = row.drafts[position % (2 * width - 2)]
            expected["tokens"].append(ids.get(token, token))
            expected["positions"].append(position)
            expected["rows"].append(index)
            for group in range(groups):
                block = table[group, row.slot, position // BLOCK]
                writes[group].append(block * BLOCK + position % BLOCK)
        lengths[row.slot] = first + len(row.tokens)
        after.append(lengths[row.slot])
        starts.append(starts[-1] + len(row.tokens))
        # The last W tokens of the row, a shorter row repeating its first token, or all.
        sampled = [max(starts[-1] - back, starts[-2]) for back in range(width, 0, -1)]
        if verifies:
            sampled = range(starts[-2], starts[-1])
        samples += sampled
        for sample in sampled:
            position = first + sample - starts[-2]
            uniforms.append(row.uniforms[(position + 1) % (2 * width - 1)])
    return expected, writes, starts, after, samples, uniforms, table, lengths


@given(worlds())
def test_make_step(world):
    groups, table, lengths, last, adapters, bucket, rows, changed = world
    cells = [BlockTableUpdate(*place, block) for place, block in changed.items()]
    message = step_frame(
        bucket, rows, cells, step=0, groups=groups, block_size=BLOCK,
        decode_rows=sum(len(row.tokens) == 1 for row in rows[:1]),
    )  # fmt: skip
    before = as_tables(groups, table, lengths, last, adapters)
    step, tables = make_step.body(message, before, bucket=bucket, block_size=BLOCK)
    expected, writes, starts, after, samples, wanted, new_table, new_lengths = plainly(
        *world
    )

    used, count = starts[-1], len(rows)
    for name, values in expected.items():
        found = getattr(step, name).tolist()
        assert found[:used] == values
        if name != "tokens":
            assert found[used:] == [0] * (bucket.tokens - used)
    for group in range(groups):
        padding = [0] * (bucket.tokens - used)
        assert step.writes[group].tolist() == writes[group] + padding
    assert step.starts.tolist() == starts + [used] * (bucket.rows - count)
    assert step.lengths.tolist() == after + [0] * (bucket.rows - count)
    slots = [row.slot for row in rows]
    assert step.slots.tolist() == slots + [0] * (bucket.rows - count)
    assert step.samples.tolist()[: len(samples)] == samples
    assert all(0 <= sample < bucket.tokens for sample in step.samples)
    assert step.adapters.tolist()[:count] == [adapters[slot] for slot in slots]
    for index, slot in enumerate(slots):
        for group in range(groups):
            ids = [new_table[group, slot, place] for place in range(WIDTH)]
            assert step.blocks[group, index].tolist() == ids
    assert not step.blocks[:, count:].any()
    uniforms = step.uniforms.view(np.float32).tolist()
    assert uniforms[: len(wanted)] == wanted
    assert len(step.samples) == len(uniforms) == bucket.samples
    assert step.used_counts.tolist()[1:] == [count, used]

    result = as_tables(groups, new_table, new_lengths, last, adapters)
    for name, array in result._asdict().items():
        assert np.array_equal(getattr(tables, name), array), name
    assert all(array.dtype == np.int32 for array in step[:-1])


@given(worlds(), st.integers(1, SLOTS - 1), st.data())
def test_admit_and_release(world, slot, data):
    groups, table, lengths, last, adapters, *_ = world
    before = as_tables(groups, table, lengths, last, adapters)
    given_blocks = [data.draw(st.lists(blocks, max_size=WIDTH)) for _ in range(groups)]
    frame = admit_frame(
        slot, given_blocks, groups=groups, max_blocks_per_seq=WIDTH, length=3,
        last=77, adapter=2, temperature=0.75, top_k=7,
    )  # fmt: skip
    tables = admit.body(frame[None], before)
    for group in range(groups):
        for place in range(WIDTH):
            ids = given_blocks[group]
            table[group, slot, place] = ids[place] if place < len(ids) else 0
    lengths[slot], last[slot], adapters[slot] = 3, 77, 2
    expected = as_tables(groups, table, lengths, last, adapters)
    expected.params[slot] = [0.75, 7, *NEUTRAL[2:]]
    for name, array in expected._asdict().items():
        assert np.array_equal(getattr(tables, name), array), name

    released = release_frame(slot, groups=groups, max_blocks_per_seq=WIDTH)
    cleared = admit.body(released[None], tables)
    expected.blocks[:, slot] = 0
    for array in expected[1:]:
        array[slot] = 0
    for name, array in expected._asdict().items():
        assert np.array_equal(getattr(cleared, name), array), name


@given(
    st.dictionaries(st.integers(0, 699), st.tuples(st.integers(0, 9), st.floats(-4, 4)))
)
def test_token_biases_accumulate_and_admission_clears_them(special):
    before = empty_tables(groups=1, slots=4, max_blocks_per_seq=2, vocab=700)
    before.token_counts[:] = before.bias[:] = 5
    tables = admit.body(
        admit_frame(2, [], groups=1, max_blocks_per_seq=2)[None], before
    )
    marks = [TokenBias(token, *pair) for token, pair in special.items()]
    for at in range(0, len(marks), MAX_TOKEN_BIASES):
        tables = set_token_bias.body(
            token_bias_frame(2, marks[at : at + MAX_TOKEN_BIASES]), tables
        )
    for token in range(700):
        count, bias = special.get(token, (0, 0.0))
        assert tables.token_counts[2, token] == count
        assert tables.bias[2, token] == np.float32(bias)
    for slot in (0, 1, 3):
        assert (tables.token_counts[slot] == 5).all()
        assert (tables.bias[slot] == 5).all()


def test_every_sampling_parameter_has_a_column():
    for place, name in enumerate(PARAMS):
        frame = admit_frame(1, [], groups=1, max_blocks_per_seq=2, **{name: 0.25})
        tables = admit.body(
            frame[None], empty_tables(groups=1, slots=3, max_blocks_per_seq=2)
        )
        want = [*NEUTRAL[:place], 0.25, *NEUTRAL[place + 1 :]]
        assert tables.params[1].tolist() == want
