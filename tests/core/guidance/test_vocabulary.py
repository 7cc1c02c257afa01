"""Grammars over byte-level, SentencePiece and byte-fallback vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from inl.errors import RequestError
from inl.guidance.vocabulary import Vocabulary
from inl.text.gguf_vocabulary import read_tokenizer
from inl.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
from inl.guidance.grammars import Grammars

FILE = Path(__file__).parents[2] / "data" / "sentencepiece-bpe.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "name of the city": {"type": "string", "maxLength": 12},
        "größe": {"enum": ["klein", "groß", "日本"]},
        "counts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name of the city", "größe", "counts"],
    "additionalProperties": False,
}


def sentencepiece(index):
    model = json.loads(FILE.read_text("utf-8"))[index]
    fields = {
        "model": "llama", "tokens": model["tokens"], "scores": model["scores"],
        "token_type": model["types"], "unknown_token_id": model["unknown"],
        "bos_token_id": 1, "eos_token_id": 2,
        "add_space_prefix": model["add_space_prefix"],
    }  # fmt: skip
    return read_tokenizer(
        {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, "m.gguf"
    )


def default_model():
    from inl.checkpoints.checkpoint import open_checkpoint
    from inl.checkpoints.hub.resolve import default_model

    return open_checkpoint(default_model()).tokenizer()


def from_json():
    """The default model's tokenizer as a tokenizer.json has it."""
    import tokenizers

    rules = default_model().rules
    return Tokenizer(tokenizers.Tokenizer.from_str(rules.to_str()))


MAKERS = {
    "GGUF": default_model,
    "tokenizer.json": from_json,
    "SentencePiece with a space": lambda: sentencepiece(0),
    "SentencePiece": lambda: sentencepiece(1),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]()


def bits(mask, vocab):
    packed = mask.view(np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")[:vocab]).tolist()


@pytest.mark.parametrize("end", [2, None])
def test_random_outputs_match_the_grammar(tokenizer, end):
    vocab, random = tokenizer.vocab_size, Random(3)
    ends = [] if end is None else [end]
    grammars = Grammars(lambda: tokenizer, vocab, ends, 10_000)
    for _ in range(3):
        guide, ids, forced = grammars.guide({"json_schema": SCHEMA}), [], 0
        while not guide.is_complete:
            assert len(ids) < 300
            allowed = bits(guide.masks()[0], vocab)
            assert not tokenizer.special_ids.intersection(allowed)
            if guide.forced:
                assert allowed == [guide.forced[0]]
                forced += 1
            ids.append(random.choice(allowed))
            guide.advance(ids[-1])
        value = json.loads(tokenizer.decode(ids))
        assert list(value) == list(SCHEMA["properties"])
        assert value["größe"] in ("klein", "groß", "日本")
        assert forced > 3


def test_an_end_token_is_allowed_only_where_the_output_is_complete(tokenizer):
    vocab = tokenizer.vocab_size
    guide = Grammars(lambda: tokenizer, vocab, [2], 99).guide({"regex": "a[ab]?"})
    first = bits(guide.masks()[0], vocab)
    assert 2 not in first
    guide.advance(next(each for each in first if tokenizer.decode([each]) == "a"))
    assert 2 in bits(guide.masks()[0], vocab)
    assert not guide.is_complete


def test_parts_of_a_text_are_encoded_with_exactly_their_bytes(tokenizer):
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, 2)
    for text in ("the", " the", "a b", ' "', "}, ", "größe", "日本", "\n", "  x"):
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[each] for each in ids) == text.encode()


def test_masks_after_drafts_are_those_after_advancing(tokenizer):
    vocab, random = tokenizer.vocab_size, Random(5)
    grammars = Grammars(lambda: tokenizer, vocab, [2], 10_000)
    guide, drafts, expected = grammars.guide({"json_schema": SCHEMA}), [], []
    walk = guide.copy()
    for _ in range(12):
        expected.append(walk.masks()[0])
        drafts.append(random.choice(bits(expected[-1], vocab)))
        walk.advance(drafts[-1])
    expected.append(walk.masks()[0])
    assert (guide.masks(drafts) == np.stack(expected)).all()
    assert (guide.masks()[0] == expected[0]).all()
    wrong = next(
        each for each in range(3, vocab) if each not in bits(expected[4], vocab)
    )
    masks = guide.masks([*drafts[:4], wrong, *drafts[5:]])
    assert (masks == np.stack(expected[:5])).all()
    assert guide.accepts(drafts) == len(drafts)
    assert guide.accepts([*drafts[:4], wrong, *drafts[5:]]) == 4
    assert guide.accepts([*drafts[:3], 2, 2]) == 3
    assert guide.accepts([]) == 0
    guide.advance(drafts[0])
    assert (guide.masks(drafts[1:]) == np.stack(expected[1:])).all()
    guide.restart()
    assert (guide.masks(drafts) == np.stack(expected)).all()


def test_other_tokenizers_are_refused():
    import tokenizers

    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    with pytest.raises(RequestError, match="neither byte-level nor"):
        Grammars(lambda: Tokenizer(rules), 2, [1], 99).guide({"regex": "a"})
