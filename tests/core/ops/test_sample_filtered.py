"""Sampling with filters, penalties and biases, against one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.ops import catalog
from inl.ops.step import empty_tables
from inl.spec.message import Row, TokenBias, admit_frame, step_frame, token_bias_frame
from inl.spec.step import Bucket

BODY = {name: spec.body for name, spec in catalog().items()}


def chosen(logits, requests, *, sampler="sample_filtered", vocab=None):
    """Tokens and tables of one step, set up by frames as from an engine."""
    vocab = logits.shape[-1]
    rows, shape = len(requests), {"groups": 1, "max_blocks_per_seq": 4}
    tables = empty_tables(**shape, slots=rows + 1, vocab=vocab)
    for slot, request in enumerate(requests, start=1):
        frame = admit_frame(slot, [[1, 2]], **shape, **request["params"])
        tables = BODY["admit"](frame[None], tables)
        counts = dict.fromkeys(request.get("prompt", ()), 1)
        # The last token of the answer is an input of this step, which counts it.
        for token in request.get("answer", ())[:-1]:
            counts[token] = counts.get(token, 0) + 2
        bias = request.get("logit_bias", {})
        marks = [
            TokenBias(token, counts.get(token, 0), bias.get(token, 0.0))
            for token in {*counts, *bias}
        ]
        tables = BODY["set_token_bias"](token_bias_frame(slot, marks), tables)
    order = sorted(range(rows), key=lambda row: not requests[row].get("answer"))
    for row in order:
        answer = requests[row].get("answer")
        tables.last[row + 1] = answer[-1] if answer else 0
    message = step_frame(
        Bucket(rows, rows, 1, sampler),
        [
            Row(
                row + 1,
                [-1] if requests[row].get("answer") else [3 % vocab],
                [requests[row].get("uniform", 0.0)],
            )
            for row in order
        ],
        step=0, groups=1, block_size=4,
        decode_rows=sum(bool(request.get("answer")) for request in requests),
    )  # fmt: skip
    step, tables = BODY["make_step"](
        message, tables, bucket=Bucket(rows, rows, 1, sampler), block_size=4
    )
    tokens, tables = BODY["sample"](logits[order], step, tables, sampler=sampler)
    found = np.empty_like(tokens)
    found[order] = tokens
    return found.tolist(), tables


vocab = st.integers(2, 40)


@st.composite
def requests(draw, size):
    ids = st.lists(st.integers(0, size - 1), max_size=8)
    return {
        "prompt": draw(ids),
        "answer": draw(ids),
        "uniform": draw(st.floats(0, 1, width=32, exclude_max=True)),
        "logit_bias": draw(
            st.dictionaries(
                st.integers(0, size - 1),
                st.floats(-20, 20, width=32) | st.just(-1e9),
                max_size=4,
            )
        ),
        "params": {
            "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 7.5])),
            "top_k": draw(st.sampled_from([0, 1, 2, 7, size, size + 9])),
            "top_p": draw(st.sampled_from([1.0, 1e-6, 0.3, 0.77, 0.95])),
            "min_p": draw(st.sampled_from([0.0, 0.013, 0.21, 1.0])),
            "repetition_penalty": draw(st.sampled_from([1.0, 0.6, 1.3, 2.0])),
            "presence_penalty": draw(st.sampled_from([0.0, -1.7, 0.9])),
            "frequency_penalty": draw(st.sampled_from([0.0, -1.1, 0.35])),
        },
    }


def at_a_border(plain_choice, row, request):
    """Tokens that a change of a parameter in its last bits would select."""
    params = request["params"]
    if params["temperature"]:
        uniforms = [request["uniform"] + shift for shift in (-1e-9, 1e-9)]
        changes = [({}, min(max(uniform, 0.0), 1.0)) for uniform in uniforms]
    else:
        names = "repetition_penalty", "presence_penalty", "frequency_penalty"
        changes = [
            ({name: params[name] * factor}, request["uniform"])
            for name in names
            for factor in (1 - 2e-7, 1 + 2e-7)
        ]
    return [
        plain_choice(
            row, request["prompt"], request["answer"], uniform,
            logit_bias=request["logit_bias"], **params | change,
        )
        for change, uniform in changes
    ]  # fmt: skip


@examples(60, 300)
@given(seed=st.integers(0, 2**32 - 1), size=vocab, data=st.data())
def test_each_row_matches_the_documented_filters(plain_choice, seed, size, data):
    rng = np.random.default_rng(seed)
    asked = data.draw(st.lists(requests(size), min_size=1, max_size=4))
    # Tenths make equal logits frequent.
    logits = np.round(3 * rng.standard_normal((len(asked), size)), 1)
    found, tables = chosen(logits, asked)
    wanted = [
        plain_choice(
            row,
            request["prompt"],
            request["answer"],
            request["uniform"],
            logit_bias=request["logit_bias"],
            **request["params"],
        )
        for row, request in zip(logits, asked, strict=True)
    ]
    for row, request, got, want in zip(logits, asked, found, wanted, strict=True):
        # Sums in another order may differ in the last bit, at a boundary.
        assert got == want or got in at_a_border(plain_choice, row, request)
    for slot, request in enumerate(asked, start=1):
        for token in range(size):
            count = 2 * request["answer"].count(token) + (token in request["prompt"])
            assert tables.token_counts[slot, token] == count
    assert tables.last[1:].tolist() == found


@given(seed=st.integers(0, 2**32 - 1), size=vocab, heat=st.floats(0.125, 5, width=32))
def test_neutral_parameters_give_the_tokens_of_sample(seed, size, heat):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((5, size))).astype(np.float32)
    asked = [
        {
            "params": {"temperature": heat},
            "uniform": float(np.float32(rng.random())),
            "answer": [0],
        }
        for _ in range(5)
    ]
    asked[3]["params"] = {}
    assert chosen(logits, asked)[0] == chosen(logits, asked, sampler="sample")[0]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 0.999999])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 2.0**-140},
        {"top_k": 3, "top_p": 0.2},
    ],
    ids=str,
)
def test_the_strictest_filters_leave_the_most_probable_token(params, uniform):
    logits = np.array([[0.5, 2.0, 1.0, -3.0]], np.float32)
    asked = [{"params": {"temperature": 1.0, **params}, "uniform": uniform}]
    assert chosen(logits, asked)[0] == [1]


@pytest.mark.parametrize("heat", [0.0, 1.0, 100.0])
def test_biases_can_ban_all_tokens_but_one(heat):
    logits = np.array([[0.5, 2.0, 1.0, -3.0]] * 4)
    for uniform in (0.0, 0.5, 0.999999):
        asked = [
            {
                "params": {"temperature": heat},
                "uniform": uniform,
                "logit_bias": {t: -1e9 for t in range(4) if t != allowed},
            }
            for allowed in range(4)
        ]
        assert chosen(logits, asked)[0] == [0, 1, 2, 3]


def test_equal_logits_are_filtered_in_ascending_id_order():
    logits = np.zeros((1, 6))
    drawn = {
        chosen(
            logits,
            [{"params": {"temperature": 1.0, "top_k": 3}, "uniform": uniform}],
        )[0][0]
        for uniform in np.linspace(0, 0.999, 50).tolist()
    }
    assert drawn == {0, 1, 2}


def test_a_masked_token_stays_masked_whatever_the_bias():
    masked = BODY["mask_logits"](np.array([[1.0, 5.0]]), np.array([[1]], np.int32))
    asked = [
        {
            "params": {"temperature": 1.0, "repetition_penalty": 100.0},
            "logit_bias": {1: 1e9},
            "prompt": [1],
            "uniform": 0.999,
        }
    ]
    assert chosen(masked, asked)[0] == [0]


def test_scores_are_log_probabilities_of_the_top_tokens():
    rng = np.random.default_rng(8)
    logits = 4 * rng.standard_normal((3, 60))
    found = BODY["score"](logits, np.array([7, 0, 59], np.int32))
    for row, token in enumerate((7, 0, 59)):
        odds = [np.exp(value) for value in logits[row].tolist()]
        logs = [float(np.log(value / sum(odds))) for value in odds]
        assert found.chosen[row] == pytest.approx(logs[token], abs=1e-12)
        order = sorted(range(60), key=lambda t: -logs[t])[:20]
        assert found.ids[row].tolist() == order
        assert found.values[row].tolist() == pytest.approx([logs[t] for t in order])
