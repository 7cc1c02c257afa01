"""SentencePiece BPE in Python, compared with the ``tokenizers`` package."""

from __future__ import annotations

import random
import re
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.errors import CheckpointError, RequestError
from inl.text import plain_scored
from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer
from inl.text.plain_scored import AddedTokens, PlainScored, word_pattern

LETTERS = "ab>\u2581\n é日🧪\0"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def random_fields(rng: random.Random) -> dict:
    """A vocabulary of pieces over few letters, most of whose texts have merges."""
    pieces = {"".join(rng.choices(LETTERS, k=rng.randint(1, 5))) for _ in range(60)}
    pieces |= set(rng.sample(LETTERS, k=rng.randint(0, len(LETTERS))))
    pieces |= {
        "<unk>",
        "<s>",
        "</s>",
        *rng.choice([[], ["<0x0A>a", "<unk>a", "a" * 130]]),
    }
    count = rng.choice([0, 200, 256])
    values = {f"<0x{byte:02X}>" for byte in rng.sample(range(256), k=count)}
    tokens = rng.sample(sorted(pieces | values), k=len(pieces | values))
    kinds = [NORMAL] * 8 + [CONTROL, USER, UNUSED]
    types = [BYTE if token in values else rng.choice(kinds) for token in tokens]
    types[tokens.index("<unk>")] = rng.choice([UNKNOWN, NORMAL])
    types[tokens.index("<s>")] = CONTROL
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [float(rng.randint(-9, 0)) for _ in tokens],
        "token_type": types if rng.random() < 0.9 else [NORMAL] * len(tokens),
        "unknown_token_id": tokens.index("<unk>"),
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        "add_space_prefix": rng.random() < 0.5,
        "add_eos_token": rng.random() < 0.5,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def random_text(rng: random.Random, tokens: list[str]) -> str:
    parts = [*rng.choices(tokens, k=5), "x", "ß", *LETTERS]
    return "".join(rng.choices(parts, k=rng.randint(0, 30)))


@examples(60, 120, 2000)
@given(seed=st.integers(0, 1 << 32))
def test_ids_and_texts_of_random_vocabularies_match_the_package(seed):
    rng = random.Random(seed)
    fields = random_fields(rng)
    plain, library = open_tokenizer(fields, "m"), read_tokenizer(fields, "m")
    tokens = fields["tokenizer.ggml.tokens"]
    for _ in range(20):
        text = random_text(rng, tokens)
        for options in ({}, {"add_special": False}, {"plain": True}):
            ids = library.encode(text, **options)
            assert plain.encode(text, **options) == ids, (text, options)
        random_ids = rng.choices(range(len(tokens) + 3), k=rng.randint(0, 12))
        for skip in (True, False):
            for each in (ids, random_ids):
                assert plain.decode(each, skip) == library.decode(each, skip)
    assert isinstance(plain.rules, PlainScored)
    for name in ("special_ids", "control_tokens", "byte_level", "marks_spaces"):
        assert getattr(plain, name) == getattr(library, name), name
    assert plain.rules.get_vocab() == library.rules.get_vocab()
    assert plain.vocab_size == library.vocab_size
    for index in (0, len(tokens) - 1, len(tokens)):
        assert plain.token(index) == library.token(index)


@pytest.fixture
def fields():
    return random_fields(random.Random(1))


def test_decoding_does_not_build_the_rules(fields):
    tokenizer = open_tokenizer(fields, "m.gguf")
    assert tokenizer.decode([3, 4])
    assert tokenizer.special_ids
    assert "rules" not in vars(tokenizer)


def test_long_texts_are_left_to_the_package(fields, monkeypatch):
    monkeypatch.setattr(plain_scored, "LONG", 20)
    tokenizer, library = open_tokenizer(fields, "m"), read_tokenizer(fields, "m")
    built = tokenizer.rules._built
    assert tokenizer.encode("ab" * 10) == library.encode("ab" * 10)
    assert not built
    for plain in (False, True):
        text = "ab <s> " * 4
        assert tokenizer.encode(text, plain=plain) == library.encode(text, plain=plain)
    assert sorted(built) == [False, True]


def test_without_the_package_long_texts_are_encoded_in_python(fields, monkeypatch):
    ids = read_tokenizer(fields, "m").encode("ab " * 50)
    monkeypatch.setattr(plain_scored, "LONG", 20)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert open_tokenizer(fields, "m").encode("ab " * 50) == ids


def test_vocabularies_with_long_added_tokens_are_left_to_the_package(fields):
    tokens, types = (
        fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type")
    )
    fields["tokenizer.ggml.tokens"] = [*tokens, "<s>" + "a" * 5000]
    fields["tokenizer.ggml.token_type"] = [*types, CONTROL]
    fields["tokenizer.ggml.scores"].append(0.0)
    tokenizer, library = open_tokenizer(fields, "m"), read_tokenizer(fields, "m")
    assert not isinstance(tokenizer.rules, PlainScored)
    text = tokenizer._spelling.tokens[-1] + "ab"
    assert tokenizer.encode(text) == library.encode(text)


def test_invalid_input_is_refused_like_the_package(fields):
    tokenizer = open_tokenizer(fields, "m.gguf")
    with pytest.raises(RequestError, match=r"'\\ud800' at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match="found bytes; accepted: text"):
        tokenizer.encode(b"ab")
    for ids in ([-1], [1 << 32], ["a"], [None]):
        with pytest.raises(RequestError, match=r"token ids.*accepted"):
            tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", None), ("scores", [0.0]), ("token_type", [7]), ("model", "t5"),
        ("unknown_token_id", 9999), ("add_space_prefix", 1), ("bos_token_id", -1),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_when_opened(key, value, fields):
    fields[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.{key}: "):
        open_tokenizer(fields, "m.gguf")


def test_repeated_tokens_are_refused_at_the_first_text(fields):
    tokens = fields["tokenizer.ggml.tokens"]
    tokens[-1] = tokens[-2]
    with pytest.raises(CheckpointError, match="twice; accepted: each token once"):
        open_tokenizer(fields, "m.gguf").encode("a")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["a", "\u2581a"], ["\u2581\u2581ab>", "\u2581\u2581c", "\u2581>", "\u2581"]),
        (["a", ">\u2581<"], ["\u2581\u2581ab>\u2581\u2581c", "\u2581>\u2581"]),
    ],
)
def test_texts_are_split_where_no_token_has_a_space_inside(tokens, words):
    pattern = word_pattern(tokens, [0.0] * len(tokens))
    assert pattern.findall("\u2581\u2581ab>\u2581\u2581c\u2581>\u2581") == words


@pytest.mark.parametrize("begins", [0, 64])
def test_added_tokens_are_the_leftmost_then_longest(begins, monkeypatch):
    monkeypatch.setattr(plain_scored, "MAX_BEGINS", begins)
    texts = ["ab", "abcd", "b", "  ", "   ", "[", "^]"]
    rng = random.Random(0)
    pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    added = AddedTokens(texts)
    for _ in range(300):
        text = "".join(rng.choices("abcd [^]", k=rng.randint(0, 20)))
        assert list(added.spans(text)) == [
            each.span() for each in pattern.finditer(text)
        ]
    assert list(AddedTokens([]).spans("ab")) == []


def test_after_many_characters_the_library_encodes(monkeypatch) -> None:
    monkeypatch.setattr(plain_scored, "MANY", 100)
    fields = random_fields(random.Random(3))
    tokenizer = open_tokenizer(fields, "x")
    text = "a" * 30
    right = tokenizer.encode(text)
    rules = tokenizer.rules
    for _ in range(4):
        assert tokenizer.encode(text) == right
    deadline = time.monotonic() + 300
    while not rules._built and time.monotonic() < deadline:
        time.sleep(0.01)
    (library,) = rules._built.values()
    assert library.get_vocab_size() == rules.get_vocab_size()
    monkeypatch.setattr(rules, "_encode_plain", None)  # Python is no longer asked
    assert tokenizer.encode(text) == right
    assert tokenizer.encode("b a") == read_tokenizer(fields, "x").encode("b a")


def test_a_vocabulary_that_the_library_refuses_stays_in_python(monkeypatch) -> None:
    monkeypatch.setattr(plain_scored, "MANY", 0)
    rules = open_tokenizer(random_fields(random.Random(3)), "x").rules

    def refuse() -> None:
        refused.set()
        raise CheckpointError("too many merges")

    refused = threading.Event()
    rules._long = refuse
    right = rules.encode("ab").ids
    assert refused.wait(300)
    assert rules.encode("ab").ids == right
    assert not rules._built
