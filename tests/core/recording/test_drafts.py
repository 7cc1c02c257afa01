"""Traces of steps that verify drafts replay like others."""

from __future__ import annotations

import pytest

from inl.errors import ProtocolError
from inl.protocol import wire_arrays
from inl.protocol.runner import Reply
from inl.recording.replay import replay
from inl.recording.trace_file import read_trace
from inl.spec.uniforms import mix
from inl.testing.hash_runner import HashRunner


class Guesses:
    """Predicts tokens of a small set, some of which are right."""

    def propose(self, queries):
        return [
            [40 + mix(len(query.tokens) + at) % 4 for at in range(query.limit)]
            for query in queries
        ]

    def forget(self, request):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def options():
    return {"max_tokens": 30, "ignore_eos": True, "allowed_token_ids": range(40, 44)}


@pytest.fixture
def trace(hashed, tmp_path, options):
    path = tmp_path / "trace"
    engine = hashed(
        trace=path, speculation="ngram", max_drafts=3, adaptive_drafts=False,
        drafter=Guesses(),
    )  # fmt: skip
    prompts = [[token] * 5 for token in range(4)]
    engine.generate(prompts, **options, temperature=0.8, seed=3)
    engine.generate(prompts, **options, logprobs=2)
    counts = engine.speculation
    assert counts.drafted > counts.accepted > 20
    engine.close()
    return read_trace(path)


def test_every_token_is_computed_again(trace):
    outcome = replay(trace, HashRunner)
    assert outcome.rows > 50
    assert not outcome.skipped
    assert not outcome.differences


def test_rows_of_unknown_sequences_are_skipped(trace):
    outcome = replay([trace[0], *trace[3:]], HashRunner)
    assert outcome.skipped
    assert outcome.rows
    assert not outcome.differences


def test_a_wrong_accepted_token_is_found(trace):
    at, wrong = next(
        (at, item)
        for at, item in enumerate(trace)
        if isinstance(item, Reply) and (item.tokens[:, 1:] >= 0).any()
    )
    row, place = (each[0] for each in (wrong.tokens[:, 1:] >= 0).nonzero())
    tokens = wrong.tokens.copy()
    tokens[row, place + 1] ^= 1
    changed = [*trace[:at], wrong._replace(tokens=tokens), *trace[at + 1 :]]
    outcome = replay(changed, HashRunner)
    (difference,) = outcome.differences
    assert (difference.step, difference.row) == (wrong.step, row)
    assert difference.recorded == difference.replayed ^ 1


def test_replies_with_scores_of_all_samples_come_back(trace):
    scored = [item for item in trace if getattr(item, "scores", None) is not None]
    verified = [reply for reply in scored if reply.tokens.shape[1] > 1]
    assert verified
    for reply in verified:
        found = wire_arrays.read_reply(bytes(wire_arrays.reply(reply)))
        assert found.tokens.tolist() == reply.tokens.tolist()
        for mine, other in zip(reply.scores, found.scores, strict=True):
            assert mine.tolist() == other.tolist()
    cut = bytes(wire_arrays.reply(verified[0]))[:-4]
    with pytest.raises(ProtocolError, match="reply of step"):
        wire_arrays.read_reply(cut)
