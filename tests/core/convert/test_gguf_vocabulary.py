"""Tokenizers of folders as GGUF metadata: the same ids, or an error that says why."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from inl.checkpoints.folder import FolderCheckpoint
from inl.convert.gguf_vocabulary import PROBES, vocabulary
from inl.errors import CheckpointError
from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer
from inl.text.pre_tokenizers import PATTERNS, WHOLE_WORDS
from inl.text.pre_tokenizers import pre_tokenizer as known
from text_samples import TEXTS

SIZE = 700
SPECIAL = ["<begin>", "<end>", "<turn>"]


def trained(pre, *, nfc=False, whole=False):
    rules = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
    rules.pre_tokenizer, rules.decoder = pre, decoders.ByteLevel()
    if nfc:
        rules.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL[:2], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    rules.train_from_iterator(PROBES * 3, trainer)
    rules.add_special_tokens(SPECIAL[2:])
    rules.add_tokens(["visible!"])
    return rules


def pieces(*, prefix):
    """BPE of SentencePiece's kind: spaces as U+2581, bytes for what is unknown."""
    tokens = ["<unk>", "<begin>", "<end>"] + [f"<0x{code:02X}>" for code in range(256)]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("l", "l"),
              ("e", "ll"), ("o", "\u2581t")]  # fmt: skip
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyzHW,.'!0123456789"]
    tokens += [*letters, *("".join(pair) for pair in merges)]
    rules = tokenizers.Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)}, merges,
            unk_token="<unk>", byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    rules.normalizer = normalizers.Sequence(
        [*steps, normalizers.Replace(" ", "\u2581")]
    )
    rules.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if prefix else []),
    ])  # fmt: skip
    rules.add_special_tokens(SPECIAL[:2])
    return rules


def checkpoint(folder, rules, *, bos=False, **settings):
    folder.mkdir(exist_ok=True)
    if bos:
        index = rules.token_to_id("<begin>")
        rules.post_processor = tokenizers.processors.TemplateProcessing(
            single="<begin> $A", special_tokens=[("<begin>", index)]
        )
    rules.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<begin>", "eos_token": "<end>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text("{}")
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return FolderCheckpoint(folder)


def written(one, size=SIZE):
    fields = vocabulary(one, one.tokenizer(), size)
    return fields, read_tokenizer(fields, "here"), open_tokenizer(fields, "here")


def check_equal(one, *others):
    original = one.tokenizer()
    for text in (*TEXTS, "<begin>visible!<turn> end<end>"):
        for other in others:
            assert other.encode(text) == original.encode(text), text
            assert other.encode(text, plain=True) == original.encode(text, plain=True)
            ids = original.encode(text, add_special=False)
            assert other.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - {"default"}))
def test_the_rules_of_each_name_are_found(tmp_path, name):
    nfc = name in ("qwen2", "qwen35")
    rules = trained(known(name), nfc=nfc, whole=name in WHOLE_WORDS)
    one = checkpoint(tmp_path / "m", rules, bos=name in WHOLE_WORDS)
    fields, *others = written(one)
    assert fields["tokenizer.ggml.pre"] == name
    assert fields["tokenizer.ggml.add_bos_token"] == (name in WHOLE_WORDS)
    check_equal(one, *others)
    types = fields["tokenizer.ggml.token_type"]
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == len(types) == SIZE
    kinds = {token: int(kind) for token, kind in zip(tokens, types, strict=True)}
    assert kinds["<turn>"] == kinds["<begin>"] == 3
    assert kinds["visible!"] == 4
    assert kinds["a"] == 1
    assert kinds[f"[PAD{SIZE - 1}]"] == 5


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_pieces_with_bytes(tmp_path, prefix, bos):
    one = checkpoint(tmp_path / "m", pieces(prefix=prefix), bos=bos)
    fields, *others = written(one)
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"] == prefix
    assert fields["tokenizer.ggml.unknown_token_id"] == 0
    original = one.tokenizer()
    for text in ("the hello the", "x the", "hello, world!", "\u2603 caf\u00e9 99"):
        for other in others:
            assert other.encode(text) == original.encode(text), text
            ids = original.encode(text, add_special=False)
            assert other.decode(ids) == original.decode(ids)


def test_ends_and_templates_are_written(tmp_path):
    folder = tmp_path / "m"
    template = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    rules = trained(known("qwen2"), nfc=True)
    turn = rules.token_to_id("<turn>")
    checkpoint(folder, rules, chat_template=template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn]}))
    one = FolderCheckpoint(folder)
    fields, *_ = written(one)
    assert fields["tokenizer.ggml.eos_token_id"] == rules.token_to_id("<end>")
    assert fields["tokenizer.ggml.eot_token_id"] == turn
    assert fields["tokenizer.chat_template"] == "plain"
    assert fields["tokenizer.chat_template.tool_use"] == "tools"


def unknown_split():
    return trained(
        pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex("."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    )  # fmt: skip


def lowercase():
    rules = trained(known("gpt-2"))
    rules.normalizer = normalizers.Lowercase()
    return rules


def unigram():
    return tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("<begin>", -2.0)], 0, False)
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (unknown_split, "rules that split texts as no known GGUF file does"),
        (lowercase, "rules that split texts as no known GGUF file does"),
        (unigram, "found the model Unigram; accepted: BPE"),
    ],
)
def test_what_gguf_cannot_say_is_refused(tmp_path, rules, message):
    one = checkpoint(tmp_path / "m", rules(), bos_token=None, eos_token=None)
    with pytest.raises(CheckpointError, match=message):
        vocabulary(one, one.tokenizer(), SIZE)


def test_pieces_whose_ids_would_differ_are_refused(tmp_path):
    rules = pieces(prefix=True)
    rules.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    text = json.loads(rules.to_str())
    text["model"]["merges"].insert(0, ["1", "2"])
    text["model"]["vocab"]["12"] = len(text["model"]["vocab"])
    one = checkpoint(tmp_path / "m", tokenizers.Tokenizer.from_str(json.dumps(text)))
    with pytest.raises(CheckpointError, match="which its GGUF form gives"):
        vocabulary(one, one.tokenizer(), SIZE)


def test_more_tokens_than_rows_are_refused(tmp_path):
    one = checkpoint(tmp_path / "m", trained(known("gpt-2")))
    with pytest.raises(CheckpointError, match="tokens; accepted: at most 300"):
        vocabulary(one, one.tokenizer(), 300)
