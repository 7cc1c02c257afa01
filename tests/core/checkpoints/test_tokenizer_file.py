"""tokenizer.json as an untrusted program: settings, growth, memory and time."""

from __future__ import annotations

import base64
import json
import os
import struct
import sys

import pytest

from depth import mostly_full
from inl.checkpoints.files import tokenizer_file
from inl.errors import CheckpointError
from inl.text import tokenizer_check
from limited import run_limited

BASE = {
    "version": "1.0",
    "added_tokens": [
        {"id": 2, "content": "<s>", "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True},
    ],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": []},
}  # fmt: skip
FRAME = {
    "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
    "pad_token": "b",
}  # fmt: skip
LONG = "b" * 40


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(part, count, key):
    return {"type": "Sequence", key: [part] * count}


def unigram(pieces):
    vocabulary = [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocabulary}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a tokenizer.json with other fields."""
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))

    def write(**fields):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({**BASE, **fields}))
        return path

    return write


def read(path):
    return tokenizer_file.load_tokenizer(path.read_bytes(), str(path))


def test_a_file_may_begin_with_the_mark_of_utf_8(written):
    path = written()
    wanted = read(path).encode("aabaa")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path).encode("aabaa") == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0,
                        "direction": "Right"}},
        {"padding": {"strategy": {"Fixed": 64}, **FRAME}},
        {"padding": {"strategy": {"Fixed": 10**12}, **FRAME}},
    ],
)  # fmt: skip
def test_truncation_and_padding_are_not_obeyed(fields, written):
    assert read(written(**fields)).encode("aabaa") == [0, 0, 1, 0, 0]


CHARSMAP = base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + b"a" * 600).decode()
"""A table of no pairs, with one text of 600 bytes."""
TEMPLATE = {"Sequence": {"id": "A", "type_id": 0}}
GROWTH = {
    "normalizer": [
        sequence(replace({"String": "b"}, LONG), 6, "normalizers"),
        replace({"Regex": "b|"}, "b" * 300),
        replace({"String": ""}, "b" * 300),
        sequence({"type": "Prepend", "prepend": "b" * 20}, 4, "normalizers"),
        {"type": "Precompiled", "precompiled_charsmap": CHARSMAP},
    ],
    "decoder": [
        sequence(replace({"String": "b"}, LONG), 6, "decoders"),
        replace({"String": "b"}, "b" * 300),
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [TEMPLATE] * 100, "pair": [TEMPLATE],
         "special_tokens": {}},
        {"type": "TemplateProcessing", "pair": [TEMPLATE],
         "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, TEMPLATE],
         "special_tokens": {"<s>": {"id": "<s>", "ids": [2] * 99,
                                    "tokens": ["<s>"] * 99}}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rules"), [(name, rules) for name in GROWTH for rules in GROWTH[name]]
)
def test_rules_that_multiply_a_text_are_refused(name, rules, written):
    path = written(**{name: rules})
    with pytest.raises(CheckpointError) as caught:
        tokenizer_file.build_tokenizer(path.read_bytes(), str(path))
    for part in (f"{path}: {name}: found", "accepted: up to"):
        assert part in str(caught.value)


def test_rules_of_real_tokenizers_are_accepted(written):
    space, metaspace = {"String": " "}, "\u2581"
    llama = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": metaspace},
            replace(space, metaspace),
        ],
    }
    t5 = {"type": "Sequence", "normalizers": [
        replace({"String": "``"}, '"'), {"type": "NFKC"}, {"type": "Lowercase"},
        replace({"Regex": " {2,}"}, metaspace)]}  # fmt: skip
    for normalizer in (llama, t5, {"type": "NFC"}):
        assert read(written(normalizer=normalizer)).encode("ab") == [0, 1]


READ = """
from pathlib import Path
from inl.checkpoints.folder import FolderCheckpoint
import tokenizers

def work():
    path = Path(sys.argv[1])
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    tokenizer = FolderCheckpoint(path).tokenizer()
    return len(tokenizer.encode("b" * 4000))
"""
BOMBS = {
    "a vocabulary of long pieces": {
        "model": unigram([chr(97 + at) * 100_000 for at in range(20)])
    },
    "a normalizer": {
        "normalizer": sequence(replace({"String": "b"}, LONG), 6, "normalizers")
    },
    "padding": {"padding": {"strategy": {"Fixed": 30_000_000}, **FRAME}},
}


@pytest.mark.skipif(sys.platform != "linux", reason="measured with /proc")
@pytest.mark.parametrize("name", mostly_full(BOMBS))
def test_bombs_take_little_memory_and_time(name, written):
    path = written(**BOMBS[name])
    found = run_limited(READ, path.parent)
    assert found.result in ("read", "refused"), found
    assert found.memory < 3 * path.stat().st_size + (256 << 20), found
    assert found.seconds < 5, found
    if found.result == "refused":
        assert str(path) in found.message


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_the_trial_has_a_limit_of_time(written, monkeypatch):
    program = """
import inl.text.tokenizer_check as check
check.CPU_SECONDS = 1
check._encode = lambda rules, text: any(iter(int, 1))
check.main()
"""
    monkeypatch.setattr(tokenizer_check, "PROGRAM", program)
    with pytest.raises(CheckpointError, match=r"trial failed: took too much processor"):
        read(written())


def test_a_file_is_tried_once(written, monkeypatch):
    path, tried = written(), []
    monkeypatch.setattr(
        tokenizer_file, "try_tokenizer", lambda text, where: tried.append(text)
    )
    assert read(path).encode("ab") == read(path).encode("ab") == [0, 1]
    assert len(tried) == 1
    read(written(model={"type": "BPE", "vocab": {"a": 1}, "merges": []}))
    assert len(tried) == 2


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_note_that_others_could_have_made_is_not_trusted(written, monkeypatch):
    path, tried = written(), []
    monkeypatch.setattr(
        tokenizer_file, "try_tokenizer", lambda text, where: tried.append(text)
    )
    read(path)
    tokenizer_file._tried().chmod(0o777)
    read(path)
    assert len(tried) == 2
