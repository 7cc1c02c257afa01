"""A grammar behind free text: what each token allows, with drafts or without."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inl.errors import RequestError
from inl.guidance.guide_after_text import FreeText, GuideAfterText
from inl.guidance.structured import read_structured
from inl.protocol.token_masks import mask_width

TOKENS = [b"", b"a", b"</t", b"hink>", b">\n", b">x", b"</think>", b"</think>{", b"<"]
END, A, HALF, REST, BLANK, BAD, WHOLE, BEYOND, OPEN = range(len(TOKENS))
MARK = b"</think>"


class OnlyA:
    """Allows the token ``a`` once, then the end."""

    def __init__(self):
        self.restart()

    def restart(self):
        self.count = 0

    def copy(self):
        return OnlyA()

    @property
    def is_complete(self):
        return self.count > 1

    @property
    def forced(self):
        return [A] if not self.count else []

    def advance(self, token):
        self.count += 1

    def masks(self, drafts=()):
        rows = [1 << (A if not self.count else END)]
        if drafts and not self.count and drafts[0] == A:
            rows.append(1 << END)
        return np.array(rows, np.int32)[:, None]

    def accepts(self, drafts):
        return int(bool(drafts) and not self.count and drafts[0] == A)


@pytest.fixture
def guide():
    text = FreeText(MARK, TOKENS, len(TOKENS), [END])
    return GuideAfterText(text, OnlyA())


def allowed(row):
    return {at for at in range(len(TOKENS)) if row[at // 32] >> (at % 32) & 1}


def test_any_text_precedes_the_mark_but_not_the_end(guide):
    assert guide.masks().shape == (1, mask_width(len(TOKENS)))
    assert allowed(guide.masks()[0]) == {A, HALF, REST, BLANK, BAD, WHOLE, OPEN}
    assert list(guide.forced) == []


def test_no_token_goes_on_behind_the_mark(guide):
    text = FreeText(MARK, [b"", b">\n", b">x", b"</think"], 4, [0])
    begun = text.after(b"", 3)
    assert begun == b"</think"
    assert text.allows(begun, 1)
    assert not text.allows(begun, 2)
    assert text.allows(b"", 2)
    assert text.after(begun, 1) is None


def test_the_grammar_begins_behind_the_mark(guide):
    for token in (A, HALF, A, OPEN, HALF, REST):
        assert not guide.is_complete
        guide.advance(token)
    assert list(guide.forced) == [A]
    assert allowed(guide.masks()[0]) == {A}
    guide.advance(A)
    assert allowed(guide.masks()[0]) == {END}
    guide.advance(END)
    assert guide.is_complete
    guide.restart()
    assert A in allowed(guide.masks()[0])
    assert not guide.is_complete


def test_masks_of_drafts_are_those_of_each_step(guide):
    draw = random.Random(7)
    for _ in range(200):
        drafts = [draw.choice([A, HALF, REST, WHOLE, OPEN, END]) for _ in range(6)]
        twin, rows = guide.copy(), []
        for token in [*drafts, None]:
            rows.append(twin.masks()[0])
            if token is None or token not in allowed(rows[-1]) or token == END:
                break
            twin.advance(token)
        assert np.array_equal(guide.masks(drafts), np.stack(rows)), drafts
        assert guide.accepts(drafts) == len(rows) - 1, drafts


def test_the_mark_is_read_beside_the_grammar():
    grammar = read_structured({"choice": ["a"], "after": "</think>"}, 99)
    assert grammar.after == "</think>"
    for mark in ("", 3):
        with pytest.raises(RequestError, match="after"):
            read_structured({"choice": ["a"], "after": mark}, 99)
    with pytest.raises(RequestError, match="accepts a dict with one of"):
        read_structured({"after": "x"}, 99)
