"""Tokenizer fixtures: the default model's, and a small one with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="session")
def oracle():
    """Prompts and their ids, computed by transformers from the same file."""
    return json.loads((DATA / "smollm2-oracle.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="session")
def default_checkpoint():
    """SmolLM2-135M-Instruct, downloaded by the first test run on a machine."""
    from inl.checkpoints.checkpoint import open_checkpoint
    from inl.checkpoints.hub.resolve import default_model

    checkpoint = open_checkpoint(default_model())
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="session")
def default_tokenizer(default_checkpoint):
    return default_checkpoint.tokenizer()


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory):
    """A vocabulary like Llama 2's: U+2581 for spaces, and byte fallback."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    from inl.checkpoints.files.tokenizer_file import load_tokenizer

    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "▁a", "▁the", "a", "b", "é", "the", "日", "�", ".", "▁."]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    rules = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    rules.add_special_tokens(["<unk>", "<s>"])
    rules.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rules.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path = tmp_path_factory.mktemp("fallback") / "tokenizer.json"
    rules.save(str(path))
    return load_tokenizer(path.read_bytes(), str(path))
