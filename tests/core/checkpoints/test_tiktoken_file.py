"""A lone tiktoken.model: ids that the tiktoken package 0.14 gave, and damaged files."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.hub.hugging_face import parse_name, select_files
from inl.errors import CheckpointError, MissingPackage
from inl.text import gguf_vocabulary
from inl.text.pre_tokenizers import HAN

DATA = json.loads(
    (Path(__file__).parents[2] / "data" / "tiktoken-bpe.json").read_text("utf-8")
)
"""Tokens in base64 by id, texts, their ids with the patterns of two families, and the
ranges of the script Han."""
TOKENS, TEXTS = DATA["tokens"], DATA["texts"]
COUNT = len(TOKENS)
KIMI_SETTINGS = {
    "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(COUNT): {"content": "[BOS]", "special": True},
        str(COUNT + 1): {"content": "[EOS]", "special": True},
        str(COUNT + 4): {"content": "<|tool|>", "special": False},
    },
}  # fmt: skip
SETTINGS = {"kimi_k2": KIMI_SETTINGS, "llama": {}}


@pytest.fixture
def folder(tmp_path):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def lines(tokens=TOKENS):
    return "".join(f"{token} {rank}\n" for rank, token in enumerate(tokens)).encode()


def opened(folder, data, kind, settings, name="tiktoken.model"):
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / name).write_bytes(data)
    return open_checkpoint(folder)


def read(folder, kind, data=None, name="tiktoken.model"):
    return opened(folder, data or lines(), kind, SETTINGS[kind], name).tokenizer()


def test_the_patterns_of_both_families_differ_on_some_texts():
    pairs = zip(DATA["ids"]["llama"], DATA["ids"]["kimi_k2"], strict=True)
    assert sum(one != other for one, other in pairs) >= 3


@pytest.mark.parametrize("library", [True, False], ids=["tokenizers", "python"])
@pytest.mark.parametrize("kind", ["llama", "kimi_k2"])
def test_ids_and_texts_are_those_of_the_reference(folder, kind, library, monkeypatch):
    if not library:
        monkeypatch.setattr(gguf_vocabulary, "library", missing)
    tokenizer = read(folder, kind)
    for text, ids in zip(TEXTS, DATA["ids"][kind], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == text


def missing():
    raise MissingPackage("tokenizers")


def test_llama_3_has_its_control_tokens_behind_the_vocabulary(folder):
    tokenizer = read(folder, "llama", name="tokenizer.model")
    assert tokenizer.encode("")[:1] == [COUNT]
    text = "<|start_header_id|>user<|end_header_id|>x<|eot_id|>"
    ids = tokenizer.encode(text, add_special=False)
    assert (ids[0], ids[-1]) == (COUNT + 6, COUNT + 9)
    assert tokenizer.eos_token == "<|end_of_text|>"
    assert tokenizer.token(COUNT + 255) == "<|reserved_special_token_247|>"
    assert tokenizer.vocab_size == COUNT + 256


def test_kimi_takes_its_control_tokens_from_the_settings(folder):
    checkpoint = opened(folder, lines(), "deepseek_v3", KIMI_SETTINGS)
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.eos_token_ids == (COUNT + 1,)
    assert tokenizer.encode("[EOS]<|tool|>") == [COUNT + 1, COUNT + 4]
    assert tokenizer.decode([COUNT + 1, COUNT + 4]) == "<|tool|>"
    assert tokenizer.token(COUNT + 2) == f"<|reserved_token_{COUNT + 2}|>"
    assert tokenizer.bos_token == "[BOS]"


def test_han_is_the_script_of_the_reference():
    pattern = re.compile(f"[{HAN}]")
    found = {code for code in range(0x110000) if pattern.match(chr(code))}
    assert found == {one for a, b in DATA["han"] for one in range(a, b + 1)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "found no tokens"),
        (lines()[:-8] + b"\n", "in line"),
        (b"YQ== 0\nYg== 2\n", "no token of id 1"),
        (b"YQ== 0\nYg== 0\n", "id 0 twice"),
        (b"YQ== 0\nY!== 1\n", "in line 2"),
        (b"YQ== 0\nYg== -1\n", "in line 2"),
        (b"YQ== 0\nYg== 99999999999\n", "in line 2"),
        (b"YQ== 0\n" + base64.b64encode(b"a" * 300) + b" 1\n", "up to 256 bytes"),
        (b"YQ== 0\nYQ== 1\n", "twice"),
    ],
)
def test_damaged_files_are_refused(folder, data, message):
    with pytest.raises(CheckpointError, match=message):
        read(folder, "kimi_k2", data or b"\n").encode("a")


def test_a_family_without_a_known_pattern_is_refused(folder):
    checkpoint = opened(folder, lines(), "gpt_oss", {})
    with pytest.raises(
        CheckpointError, match=r"how texts are split.*'gpt_oss'.*kimi_k2"
    ):
        checkpoint.tokenizer()


def test_an_added_token_far_behind_the_vocabulary_is_refused(folder):
    far = {str(1 << 40): {"content": "<far>"}}
    checkpoint = opened(folder, lines(), "kimi_k2", {"added_tokens_decoder": far})
    with pytest.raises(CheckpointError, match="below 1048576"):
        checkpoint.tokenizer()


def test_the_hub_downloads_it():
    files = ["config.json", "model.safetensors", "tiktoken.model"]
    assert set(select_files(parse_name("a/b"), files)) == set(files)


def test_damaged_bytes_are_read_or_refused(folder, depth):
    rng = np.random.default_rng(9)
    whole, messages = np.frombuffer(lines(), np.uint8), []
    cases = depth(100, 400, 4_000)
    for _ in range(cases):
        data = whole.copy()
        places = rng.integers(0, len(data), rng.integers(1, 4))
        data[places] = rng.integers(0, 256, len(places))
        try:
            ids = read(folder, "kimi_k2", data.tobytes()).encode("The dog's 中文 42")
        except CheckpointError as error:
            messages.append(str(error))
        else:
            assert all(0 <= index < COUNT for index in ids)
    assert 0 < len(messages) < cases
    assert all("accepted" in message for message in messages)
