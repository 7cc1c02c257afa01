"""A lone tokenizer.model: the ids of the reference package, and damaged files."""

from __future__ import annotations

import io
import json
from contextlib import suppress

import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import save_file

from inl.checkpoints.checkpoint import open_checkpoint
from inl.errors import CheckpointError

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps in the sun. ",
    "Numbers such as 12345 and 3.14159, names such as Zürich, and emoji 🙂 occur. ",
    "def add(a, b):\n    return a + b\n",
)
TEXTS = (
    "The dog", " two  spaces ", "", "\n\ttabs", "Zürich 🙂🙃", "naïve café", "12345",
    "return a + b", "日本語", "<s>text</s>",
)  # fmt: skip


def trained(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": True,
            **options,
        },
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def read(folder, model, **settings):
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_the_reference(folder, prefix, text):
    data = trained(add_dummy_prefix=prefix)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = read(folder, data)
    if "<s>" not in text:
        ids = theirs.encode(text)
        assert list(ours.encode(text, add_special=False)) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode(text)[0] == theirs.bos_id()


def test_the_settings_add_tokens_behind_the_pieces(folder, model):
    count = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    listed = {
        str(count): {"content": "<|im_end|>", "special": True},
        str(count + 1): {"content": "<tool>", "special": False},
        "2": {"content": "</s>", "special": True},
    }
    tokenizer = read(folder, model, added_tokens_decoder=listed, add_bos_token=False)
    ids = tokenizer.encode("dog<|im_end|><tool>")
    assert ids[-2:] == [count, count + 1]
    assert tokenizer.decode(ids) == "dog<tool>"


def test_added_tokens_of_their_own_file(folder, model):
    count = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": count}))
    tokenizer = read(folder, model, pad_token="<x>", add_bos_token=False)
    assert tokenizer.encode("<x>") == [count]
    assert count in tokenizer.special_ids


def test_tokenizer_json_comes_first(folder, model):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read(folder, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "model_type: found 1"),
        ({"normalization_rule_name": "nmt_nfkc"}, "precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_other_kinds_are_refused(folder, options, message):
    with pytest.raises(CheckpointError, match=message):
        read(folder, trained(**options))


def test_an_added_token_behind_a_hole_is_refused(folder, model):
    with pytest.raises(CheckpointError, match="ids without a hole"):
        read(folder, model, added_tokens_decoder={"9999": {"content": "x"}})


PIECES = b"\x0a\x02\x0a\x00" * ((1 << 20) + 1)
SPEC = b"\x12\x82\x10" + b"\x08\x01" * 1025


@pytest.mark.parametrize("message", [PIECES, SPEC], ids=["pieces", "fields"])
def test_counts_are_bounded(folder, message):
    with pytest.raises(CheckpointError, match="found over"):
        read(folder, message)


def test_damaged_files_are_refused_or_read(folder, model, depth):
    """Every error is a CheckpointError; nothing hangs or takes more memory."""
    rng = np.random.default_rng(5)
    for _ in range(depth(200, 800, 6_000)):
        data = bytearray(model[: rng.integers(1, len(model))])
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(0, 256)
        with suppress(CheckpointError):
            read(folder, bytes(data)).encode("The dog")
