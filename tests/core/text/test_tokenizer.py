from __future__ import annotations

import sys
from itertools import count

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from depth import examples
from inl.checkpoints.files.tokenizer_file import load_tokenizer
from inl.checkpoints.gguf.file import GgufFile
from inl.errors import CheckpointError, MissingPackage, RequestError
from inl.text import tokenizer
from inl.text.detokenize import Detokenizer
from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer
from inl.text.pre_tokenizers import PATTERNS, PRE, pre_tokenizer
from inl.text.tokenizer import Tokenizer, library
from text_samples import TEXTS, metadata


@pytest.fixture(scope="session")
def reference(default_checkpoint):
    """The default model's published rules, with the reference package's metadata."""
    fields = gguf.GGUFReader(default_checkpoint.path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [
        tuple(one.split(" ")) for one in fields["tokenizer.ggml.merges"].contents()
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    rules = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    rules.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    rules.decoder = decoders.ByteLevel()
    control = [one for one, kind in zip(tokens, kinds, strict=True) if kind == 3]
    rules.add_special_tokens(control)
    return rules


def test_prompt_ids_match_the_oracle(default_checkpoint, default_tokenizer, oracle):
    assert len(oracle) == 9
    template = default_checkpoint.chat_template
    for case in oracle:
        prompt = case["prompt"]
        if case["kind"] == "raw":
            ids = default_tokenizer.encode(prompt)
        else:
            text = template.apply([{"role": "user", "content": prompt}])
            ids = default_tokenizer.encode(text, add_special=False)
        assert ids == case["prompt_ids"]
    template.close()


def test_texts_match_the_oracle(default_tokenizer, oracle):
    for case in oracle:
        assert default_tokenizer.decode(case["token_ids"]) == case["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_match_the_published_tokenizer(text, default_tokenizer, reference):
    ids = default_tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    for skip in (True, False):
        found = default_tokenizer.decode(ids, skip)
        assert found == reference.decode(ids, skip_special_tokens=skip)
    assert default_tokenizer.decode(ids, skip_special=False) == text


@examples(60, 300)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cn", "Cc"])))
def test_ids_of_random_text_match_the_published_tokenizer(
    text, default_tokenizer, reference
):
    ids = default_tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert default_tokenizer.decode(ids, skip_special=False) == text


def test_facts_of_the_default_tokenizer(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_token == "<|im_start|>"
    assert default_tokenizer.eos_token == "<|im_end|>"
    assert default_tokenizer.special_ids == frozenset(range(17))
    assert default_tokenizer.token_id("<|im_end|>") == 2
    assert default_tokenizer.token(2) == "<|im_end|>"
    assert default_tokenizer.token(10**6) is None


def test_token_bytes_concatenate_to_the_text(default_tokenizer):
    for text in TEXTS:
        ids = default_tokenizer.encode(text)
        assert b"".join(map(default_tokenizer.token_bytes, ids)) == text.encode()


def test_a_lone_surrogate_is_refused(default_tokenizer):
    with pytest.raises(RequestError, match=r"'\\ud800' at character 2"):
        default_tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match="found bytes; accepted: text"):
        default_tokenizer.encode(b"ab")


def test_bytes_outside_the_vocabulary_are_dropped(default_tokenizer, reference):
    assert default_tokenizer.encode("a\x06b") == reference.encode("a\x06b").ids
    assert default_tokenizer.decode(default_tokenizer.encode("a\x06b")) == "ab"


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["a"], [None]])
def test_invalid_ids_are_refused(ids, default_tokenizer):
    with pytest.raises(RequestError, match=r"token ids.*accepted"):
        default_tokenizer.decode(ids)


def test_an_id_without_a_token_is_dropped(default_tokenizer):
    assert default_tokenizer.decode([19556, 4_000_000]) == "Hello"


def pieces(name, text):
    found = pre_tokenizer(name).pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["I", "'ve", " 1234", "!!", " ", " x", "\n\n", "y"]),
        ("smollm", ["I", "'ve", " ", "1", "2", "3", "4", "!!", " ", " x", "\n\n", "y"]),
        ("llama-bpe", ["I", "'ve", " ", "123", "4", "!!", " ", " x", "\n\n", "y"]),
        ("qwen2", ["I", "'ve", " ", *"1234", "!!", " ", " x", "\n\n", "y"]),
        ("default", ["I", "'", "ve", " ", "123", "4", "!!", " ", " x", "\n\n", "y"]),
        ("tekken", ["I", "'ve", " ", *"1234", "!!", " ", " x", "\n\n", "y"]),
        ("gpt-4o", ["I've", " ", "123", "4", "!!", " ", " x", "\n\n", "y"]),
        ("deepseek-v3", ["I", "'ve", " ", "123", "4", "!!", " ", " x", "\n\n", "y"]),
        ("bloom", ["I've", " 1234", "!! ", " x", "\n\n", "y"]),
    ],
)
def test_pre_tokenizer_splits(name, expected):
    # "default" splits off punctuation first, so that "'ve" is not a suffix.
    if name in ("gpt-2", "smollm", "default"):
        expected = [
            part
            for one in expected
            for part in (["\n", "\n"] if one == "\n\n" else [one])
        ]
    assert pieces(name, "I've 1234!!  x\n\ny") == expected


@pytest.mark.parametrize("name", PRE)
def test_every_pre_tokenizer_preserves_every_character(name):
    assert PRE[name] in PATTERNS
    for text in TEXTS:
        assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4]),
        ({"add_bos_token": True}, [0, 4]),
        ({"add_eos_token": True}, [4, 1]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 4, 1]),
        ({"pre": "llama-bpe"}, [0, 4]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [4]),
        ({"pre": None}, [4]),
    ],
)
def test_bos_and_eos_tokens(changes, expected):
    tokenizer = read_tokenizer(metadata(**changes), "m.gguf")
    assert tokenizer.encode("ab") == expected
    assert tokenizer.encode("ab", add_special=False) == [4]
    assert tokenizer.decode(expected) == "ab"


def test_control_tokens_in_text_are_encoded():
    tokenizer = read_tokenizer(metadata(), "m.gguf")
    assert tokenizer.encode("<s>ba</s>") == [0, 3, 2, 1]
    assert tokenizer.encode("baba") == [3, 5]
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model": "bert"}, ["tokenizer.ggml.model", "bert", "gpt2"]),
        ({"model": "llama"}, ["tokenizer.ggml.scores", "nothing", "numbers"]),
        ({"model": None}, ["tokenizer.ggml.model", "nothing"]),
        ({"model": 3}, ["tokenizer.ggml.model", "found 3"]),
        ({"pre": "new-one"}, ["tokenizer.ggml.pre", "'new-one'", "llama-bpe, qwen2"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens", "nothing"]),
        ({"tokens": ["a", 3]}, ["tokenizer.ggml.tokens", "strings"]),
        ({"tokens": ["a", "b", "a"]}, ["tokenizer.ggml.tokens", "'a' twice"]),
        ({"token_type": [1]}, ["token_type", "found 1 entries", "6"]),
        ({"token_type": [1, 1, 1, 1, 1, 9]}, ["token_type", "found 9", "0 to 6"]),
        ({"merges": ["ab"]}, ["merges", "'ab'", "space"]),
        ({"merges": ["a b c"]}, ["merges", "'a b c'"]),
        ({"merges": ["a z"]}, ["merges", "z", "tokenizer.ggml.tokens"]),
        ({"merges": [7]}, ["merges", "strings"]),
        ({"merges": None}, ["merges", "nothing"]),
        ({"bos_token_id": 6}, ["bos_token_id", "found 6", "below 6"]),
        ({"eos_token_id": -1}, ["eos_token_id", "found -1"]),
        ({"eos_token_id": "1"}, ["eos_token_id", "'1'"]),
        ({"add_bos_token": 1}, ["add_bos_token", "found 1", "true or false"]),
    ],
)
def test_invalid_metadata_is_refused(changes, parts):
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(metadata(**changes), "m.gguf")
    message = str(caught.value)
    missing = [part for part in ["m.gguf", "accepted", *parts] if part not in message]
    assert missing == [], message
    # With several errors, either may be reported first.
    with pytest.raises(CheckpointError, match=r"^m\.gguf: tokenizer\.ggml\.\w+: "):
        open_tokenizer(metadata(**changes), "m.gguf").encode("ab")


def test_lazy_rules_equal_eager_rules(default_checkpoint, default_tokenizer):
    """The file's tokenizer, built eagerly and lazily, gives the same ids."""
    fields = GgufFile(default_checkpoint.path).metadata
    built = read_tokenizer(fields, "m.gguf")
    waiting = open_tokenizer(fields, "m.gguf")
    assert waiting.special_ids == built.special_ids
    assert waiting.byte_level is built.byte_level is True
    ids = range(-1, built.vocab_size + 2)
    tokens = [built.token(index) if index >= 0 else None for index in ids]
    assert [waiting.token(index) for index in ids] == tokens
    assert "rules" not in vars(waiting)
    text = "naïve 𝄞 <|im_start|>x"
    assert waiting.encode(text) == built.encode(text)


def test_decoding_needs_no_package(default_checkpoint, monkeypatch, oracle):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = open_tokenizer(GgufFile(default_checkpoint.path).metadata, "m.gguf")
    for case in oracle:
        detokenizer = Detokenizer(tokenizer)
        text = "".join(map(detokenizer.add, case["token_ids"]))
        assert text + detokenizer.finish() == case["text"]
    assert "rules" not in vars(tokenizer)


@pytest.mark.parametrize("by_file", [False, True])
def test_rules_without_control_tokens_are_a_copy(by_file, monkeypatch):
    model = models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])
    rules = tokenizers.Tokenizer(model)
    rules.normalizer = tokenizers.normalizers.NFC()
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    rules.decoder = decoders.Fuse()
    rules.add_tokens(["xa"])
    rules.add_special_tokens(["<s>", tokenizers.AddedToken("b", lstrip=True)])
    rules.add_tokens([tokenizers.AddedToken("yy", single_word=True)])
    rules.add_special_tokens(["</s>"])
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rules.token_to_id("<s>"))]
    )
    rules.enable_truncation(5)
    rules.enable_padding(length=4)
    if by_file:  # as where the library gives added tokens other ids
        numbers = count()
        monkeypatch.setattr(tokenizer, "_shown", lambda _: next(numbers))
    text = "ab <s> b xa</s>"
    before = rules.encode(text).ids
    plain = Tokenizer(rules, where="here")._plain_rules
    assert plain.to_str() == rules.to_str()
    assert plain.encode_special_tokens
    assert not rules.encode_special_tokens
    assert rules.encode(text).ids == before != plain.encode(text).ids


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MissingPackage, match=r"pip install .*core\[text\]"):
        library()


def test_a_panic_becomes_a_checkpoint_error():
    class Panic(BaseException):
        """The exception that the library raises for a Rust panic."""

    class Rules:
        def encode(self, text, add_special_tokens):
            raise Panic("no entry found for key")

    with pytest.raises(CheckpointError, match=r"m\.json: no entry found .*accepted"):
        Tokenizer(Rules(), where="m.json").encode("ab")


def test_a_missing_merge_token_is_reported_at_the_first_encode():
    rules = tokenizers.Tokenizer(models.BPE({"a": 0}, [], unk_token="<unk>"))
    tokenizer = load_tokenizer(rules.to_str().encode(), "tokenizer.json")
    assert tokenizer.encode("a") == [0]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*<unk>.*accepted"):
        tokenizer.encode("b")
