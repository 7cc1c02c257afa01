"""SentencePiece BPE from GGUF, compared with recorded ids of SentencePiece."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from inl.errors import CheckpointError
from inl.text import gguf_vocabulary, scored_bpe
from inl.text.detokenize import Detokenizer
from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer
from inl.text.scored_bpe import merges
from text_samples import metadata as small_metadata

MODELS = json.loads(
    (Path(__file__).parents[2] / "data" / "sentencepiece-bpe.json").read_text("utf-8")
)
"""Two vocabularies trained by SentencePiece: with a space prefix and no user-defined
tokens, and vice versa. Ids and texts are its results."""


def metadata(model, **changes):
    fields = {
        "model": "llama",
        "tokens": model["tokens"],
        "scores": model["scores"],
        "token_type": model["types"],
        "unknown_token_id": model["unknown"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": model["add_space_prefix"],
    }
    fields |= changes
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in fields.items()
        if value is not None
    }


@pytest.fixture(scope="module", params=[0, 1], ids=["prefix", "user-defined"])
def model(request):
    return MODELS[request.param]


@pytest.fixture(scope="module", params=[read_tokenizer, open_tokenizer])
def tokenizer(model, request):
    return request.param(metadata(model), "m.gguf")


def test_ids_match_sentencepiece(model, tokenizer):
    assert len(model["cases"]) > 100
    for case in model["cases"]:
        assert tokenizer.encode(case["text"], add_special=False) == case["ids"]


def test_decoded_texts_match_sentencepiece(model, tokenizer):
    for case in model["cases"]:
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]


def test_a_stream_of_tokens_joins_to_the_text(model, tokenizer):
    assert not tokenizer.byte_level
    for case in model["cases"]:
        stream = Detokenizer(tokenizer)
        parts = [stream.add(index) for index in case["ids"]]
        assert "".join([*parts, stream.finish()]) == case["decoded"]


def test_bos_is_added_by_default(model, tokenizer):
    ids = tokenizer.encode("a", add_special=False)
    assert tokenizer.encode("a") == [1, *ids]
    without = read_tokenizer(metadata(model, add_bos_token=False), "m.gguf")
    assert without.encode("a") == ids
    ends = read_tokenizer(metadata(model, add_eos_token=True), "m.gguf")
    assert ends.encode("a") == [1, *ids, 2]


def test_control_tokens_in_text_are_encoded_and_hidden(tokenizer):
    ids = tokenizer.encode("<s>the</s>", add_special=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids).strip() == "the"


def test_every_byte_round_trips(tokenizer):
    text = "".join(map(chr, [*range(1, 128), 0xE9, 0x3B1, 0x4E2D, 0x1F9EA]))
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text


def test_merges_are_ranked_by_score_and_cover_every_split():
    scores = {"a": -9.0, "b": -8.0, "ab": -2.0, "ba": -1.0, "aba": -3.0, "x": 0.0}
    assert merges(scores) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


def test_without_byte_tokens_unknown_characters_are_one_token():
    model = {
        "tokens": ["<unk>", "<s>", "</s>", "a", "\u2581"],
        "scores": [0.0] * 5,
        "types": [2, 3, 3, 1, 1],
        "unknown": 0,
        "add_space_prefix": False,
    }
    tokenizer = read_tokenizer(metadata(model), "m.gguf")
    assert tokenizer.encode("axya") == [1, 3, 0, 3]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"scores": None}, ["tokenizer.ggml.scores", "nothing", "numbers"]),
        ({"scores": [0.5]}, ["scores", "found 1 entries", "600, one for each"]),
        ({"scores": [1] * 600}, ["scores", "found 1", "numbers"]),
        ({"scores": [None] * 600}, ["scores", "found None", "numbers"]),
        ({"token_type": [None] * 600}, ["token_type", "found None", "0 to 6"]),
        ({"scores": [float("nan")] * 600}, ["scores", "found nan"]),
        ({"unknown_token_id": 600}, ["unknown_token_id", "found 600", "below 600"]),
        ({"add_space_prefix": 1}, ["add_space_prefix", "found 1", "true or false"]),
        ({"token_type": [7] * 600}, ["token_type", "found 7", "0 to 6"]),
    ],
)
def test_invalid_metadata_is_refused(changes, parts):
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(metadata(MODELS[0], **changes), "m.gguf")
    message = str(caught.value)
    missing = [part for part in ["m.gguf", "accepted", *parts] if part not in message]
    assert missing == [], message


def test_vocabularies_with_too_many_merges_are_refused(monkeypatch):
    """Every split of every text over two letters is a merge."""
    tokens = ["".join(each) for n in range(1, 9) for each in product("ab", repeat=n)]
    fields = {
        "model": "llama", "tokens": ["<unk>", *tokens], "unknown_token_id": 0,
        "scores": [0.0] * (len(tokens) + 1), "token_type": [2, *[1] * len(tokens)],
        "bos_token_id": None, "eos_token_id": None, "merges": None, "pre": None,
    }  # fmt: skip
    assert read_tokenizer(small_metadata(**fields), "m.gguf").encode("abab")
    sentence = r"m\.gguf: tokenizer\.ggml\.tokens: found tokens of 3586 char"
    for name, limit in (("MAX_SPLITS", 3000), ("MAX_MERGES", 2000)):
        with monkeypatch.context() as patch:
            patch.setattr(scored_bpe, name, limit)
            with pytest.raises(CheckpointError, match=sentence):
                read_tokenizer(small_metadata(**fields), "m.gguf")


@pytest.mark.parametrize("field", ["tokens", "merges"])
def test_vocabularies_of_more_tokens_than_any_are_refused(field, monkeypatch):
    monkeypatch.setattr(gguf_vocabulary, "MAX_TOKENS", 6)
    given = [f"t{at} a" for at in range(7)]
    with pytest.raises(
        CheckpointError, match=f"{field}: found 7 {field}; accepted: at"
    ):
        read_tokenizer(small_metadata(token_type=None, **{field: given}), "m.gguf")


@pytest.mark.parametrize("build", [open_tokenizer, read_tokenizer])
def test_pieces_with_a_list_of_merges_are_those_of_gemmas_own_file(build):
    """As llama.cpp writes the vocabulary of Gemma 4; ranks are not those of scores."""
    library = pytest.importorskip("tokenizers")
    pieces = ["a", "b", "c", "\u2581", "ab", "bc", "abc", "\u2581a", "\u2581ab", "\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    pairs = ["b c", "a bc", "\u2581 a", "\u2581a b", "a b"]
    types = [3] * 4 + [6] * 256 + [1] * len(pieces)
    fields = {
        "model": "gemma4", "tokens": tokens, "merges": pairs, "token_type": types,
        "scores": [-1000.0] * len(tokens), "add_space_prefix": False,
        "add_bos_token": True, "bos_token_id": 2, "eos_token_id": 1,
        "unknown_token_id": 3,
    }  # fmt: skip
    found = build({f"tokenizer.ggml.{key}": each for key, each in fields.items()}, "m")
    ids = {token: index for index, token in enumerate(tokens)}
    model = library.models.BPE(
        ids, [tuple(pair.split(" ")) for pair in pairs], byte_fallback=True,
        fuse_unk=True, unk_token="<unk>",
    )  # fmt: skip
    own = library.Tokenizer(model)
    own.normalizer = library.normalizers.Replace(" ", "\u2581")
    for text in ("abc abc", "  ab\n\u00e9\U0001f600c", "cab bca", ""):
        assert list(found.encode(text)) == [2, *own.encode(text).ids]
        assert found.decode(found.encode(text)) == text
    assert found.encode("abc") == [2, ids["abc"]]
