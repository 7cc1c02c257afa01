"""``min_tokens`` and ``bad_words``: tokens that an output must not have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.checkpoints.hub.resolve import resolve_model
from inl.errors import RequestError
from inl.executor.model_loader import open_model
from inl.guidance.banned_tokens import BannedTokens
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner


@pytest.fixture(scope="module")
def engine():
    from inl import EngineConfig, InferenceEngine

    model = open_model(resolve_model(None))
    limits = Limits(
        slots=9, blocks=(200,), block_size=16, max_blocks_per_seq=32,
        vocab=model.config.vocab_size, depth=2,
    )  # fmt: skip
    with InferenceEngine(
        model, config=EngineConfig(max_batch=8), runner=HashRunner(limits)
    ) as made:
        yield made


def test_an_output_has_at_least_min_tokens(engine):
    ids = list(range(100, 110))
    likely = {"allowed_token_ids": ids, "temperature": 1.0, "max_tokens": 40}
    plain = [
        len(engine.generate([1], stop_ids=ids[:8], seed=seed, **likely).token_ids)
        for seed in range(5)
    ]
    assert max(plain) < 20
    for seed in range(5):
        done = engine.generate(
            [1], stop_ids=ids[:8], min_tokens=20, n=2, seed=seed, **likely
        )
        for each in (done, *done.alternatives):
            assert each.finish_reason == "stop"
            assert len(each.token_ids) > 20
            assert not {*each.token_ids[:20]} & {*ids[:8]}
            assert each.token_ids[-1] in ids[:8]


def test_an_output_has_no_bad_words(engine):
    words = [" blue", " sky", " green", " sea"]
    tokens = [engine.tokenizer.encode(word, False)[0] for word in words]
    options = {"allowed_token_ids": tokens, "temperature": 1.0, "max_tokens": 60}
    assert "sky" in engine.generate([1], seed=3, **options).text
    done = engine.generate([1], seed=3, bad_words=["sky", " blue green"], **options)
    assert "sky" not in done.text
    assert "blue green" not in done.text
    assert {"blue", "green", "sea"} == {*done.text.split()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, "min_tokens: found -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: found 5"),
        ({"min_tokens": True}, "min_tokens: found True"),
        ({"bad_words": [""]}, "bad_words: found ''"),
        ({"bad_words": ["a"] * 65}, "bad_words: found 65 entries"),
        ({"min_tokens": 1, "structured": {"regex": "a"}}, "with structured"),
    ],
)
def test_other_values_are_refused(engine, options, message):
    with pytest.raises(RequestError, match=message):
        engine.submit([1], **options)


VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)


@examples(100, 400)
@given(
    phrases=st.sets(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=6),
    ends=st.sets(TOKENS, max_size=3),
    least=st.integers(0, 4),
    output=st.lists(TOKENS, max_size=6),
    drafts=st.lists(TOKENS, max_size=4),
)
def test_masks_are_those_of_the_definition(phrases, ends, least, output, drafts):
    guide = BannedTokens(VOCAB, min_tokens=least, end_ids=ends, phrases=phrases)
    for token in output:
        guide.advance(token)

    def allowed(tokens):
        after = [[*tokens, token] for token in range(VOCAB)]
        return [
            not any(tuple(each[-len(phrase) :]) == phrase for phrase in phrases)
            and not (len(tokens) < least and each[-1] in ends)
            for each in after
        ]

    masks = guide.masks(drafts)
    assert guide.accepts(drafts) == len(masks) - 1
    tokens = list(output)
    for row, mask in enumerate(masks):
        bits = [bool(mask[t // 32] >> t % 32 & 1) for t in range(len(mask) * 32)]
        assert bits == [*allowed(tokens), *[False] * (len(bits) - VOCAB)]
        if row < len(masks) - 1:
            assert bits[drafts[row]]
            tokens.append(drafts[row])
        else:
            assert row == len(drafts) or not bits[drafts[row]]
