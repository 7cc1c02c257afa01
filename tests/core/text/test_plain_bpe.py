"""Byte-level BPE in Python, compared with the ``tokenizers`` package."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.checkpoints.gguf.file import GgufFile
from inl.errors import CheckpointError, MissingPackage, RequestError
from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer
from inl.text.plain_bpe import PlainBpe, translated, words_of
from inl.text.pre_tokenizers import PATTERNS, pre_tokenizer
from text_samples import TEXTS, metadata

# Unicode versions differ: new characters are unassigned in the older one.
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cn"]), max_size=40)
CASED = st.text(st.sampled_from("aA1²½ \n\r\t'sſLlé\u0301日!?/_\u200b\x1c\u2028"))


def in_python(fields):
    """The tokenizer without ``tokenizers`` installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        tokenizer = open_tokenizer(fields, "m.gguf")
        assert isinstance(tokenizer.rules, PlainBpe)
    return tokenizer


@pytest.fixture(scope="module")
def plain(default_checkpoint):
    return in_python(GgufFile(default_checkpoint.path).metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_match_the_package(text, plain, default_tokenizer):
    ids = default_tokenizer.encode(text)
    assert plain.encode(text) == ids
    for skip in (True, False):
        assert plain.decode(ids, skip) == default_tokenizer.decode(ids, skip)


@examples(50, 200)
@given(text=ANY_TEXT | CASED)
def test_ids_of_random_text_match_the_package(text, plain, default_tokenizer):
    ids = default_tokenizer.encode(text)
    assert plain.encode(text) == ids
    assert plain.decode(ids) == default_tokenizer.decode(ids)


@examples(15, 50)
@given(ids=st.lists(st.integers(0, 50_000)))
def test_decoded_random_ids_match_the_package(ids, plain, default_tokenizer):
    for skip in (True, False):
        assert plain.decode(ids, skip) == default_tokenizer.decode(ids, skip)


@pytest.mark.scaled
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pre_tokenizer_splits_like_the_package(name):
    rules = pre_tokenizer(name)
    patterns = [re.compile(translated(each)) for each in PATTERNS[name]]

    def check(text):
        found = [text[a:b] for _, (a, b) in rules.pre_tokenize_str(text)]
        assert words_of(text, patterns) == found

    for text in TEXTS:
        check(text)
    examples(20, 60)(given(text=ANY_TEXT | CASED)(check))()


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"pre": "llama-bpe"},
        {"pre": "qwen2"},
        {"merges": ["b a", "a b", "ab a"]},
        {"tokens": ["<s>", "</s>", "a", "b", "ab", "<s>a"]},
        {"tokens": ["<s>", "</s>", "a", "b", "ab", "aab"], "pre": "llama-bpe",
         "token_type": None},
    ],
)  # fmt: skip
def test_every_metadata_field_has_the_same_effect(changes):
    fields = metadata(**changes) | {"tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4]}
    if "merges" in changes:
        fields["tokenizer.ggml.tokens"] = ["<s>", "</s>", "a", "b", "ab", "ba", "aba"]
        fields["tokenizer.ggml.token_type"] = [3, 3, *[1] * 5]
    if "token_type" in changes:
        fields["tokenizer.ggml.token_type"] = [3, 3, 1, 1, 1, 1]
    theirs, ours = read_tokenizer(fields, "m.gguf"), in_python(fields)
    for text in ("", "ab", "aab", "abab aba", "<s>ba</s>", "baba", "a\u0301b<s>a"):
        for add in (True, False):
            assert ours.encode(text, add) == theirs.encode(text, add)
    assert ours.special_ids == theirs.special_ids
    assert ours.vocab_size == theirs.vocab_size
    assert ours.token_id("ab") == theirs.token_id("ab") == 4
    assert ours.token_id("zz") is None


@pytest.mark.timeout(120)
def test_a_long_word_takes_no_quadratic_time(plain, default_tokenizer):
    text = "abcdefghij" * 5_000
    assert plain.encode(text) == default_tokenizer.encode(text)


def test_invalid_input_is_refused_like_the_package(plain):
    with pytest.raises(RequestError, match=r"'\\ud800' at character 2"):
        plain.encode("ab\ud800")
    with pytest.raises(RequestError, match="found bytes; accepted: text"):
        plain.encode(b"ab")
    for ids in ([-1], [1 << 32], ["a"], [None]):
        with pytest.raises(RequestError, match=r"token ids.*accepted"):
            plain.decode(ids)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.ggml\.merges: .*z"):
        in_python(metadata(merges=["a z"]))


def test_scored_vocabularies_do_not_need_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    fields = metadata(model="llama", scores=[0.0] * 6)
    assert open_tokenizer(fields, "m.gguf").encode("a")
    with pytest.raises(MissingPackage, match=r"pip install .*core\[text\]"):
        read_tokenizer(fields, "m.gguf")
