"""A tokenizer whose tokens are bytes."""

from __future__ import annotations

import tokenizers

from inl.text.tokenizer import Tokenizer


def byte_rules():
    """Token i is byte i of the byte-level alphabet; there are no merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    rules = tokenizers.Tokenizer(
        tokenizers.models.BPE({s: i for i, s in enumerate(alphabet)}, [])
    )
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    rules.decoder = tokenizers.decoders.ByteLevel()
    return rules


def bytes_as_tokens():
    """Tokenizer of :func:`byte_rules`."""
    return Tokenizer(byte_rules())
