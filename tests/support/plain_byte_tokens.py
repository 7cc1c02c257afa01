"""The tokenizer of ``byte_tokens`` without the package ``tokenizers``."""

from __future__ import annotations

from types import SimpleNamespace

from inl.text.spelling import BYTES, LETTERS
from inl.text.tokenizer import Spelling, Tokenizer


class ByteRules:
    """The methods of ``tokenizers.Tokenizer`` that a byte-level tokenizer needs."""

    def __init__(self):
        self.tokens = sorted(LETTERS)
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def get_vocab_size(self, *, with_added_tokens):
        return len(self.tokens)

    def encode(self, text, *, add_special_tokens):
        return SimpleNamespace(ids=[self.ids[LETTERS[byte]] for byte in text.encode()])

    def decode(self, ids, *, skip_special_tokens):
        letters = (self.tokens[index] for index in ids if index < len(self.tokens))
        return bytes(BYTES[letter] for letter in letters).decode(errors="replace")

    def id_to_token(self, index):
        return self.tokens[index] if index < len(self.tokens) else None

    def token_to_id(self, token):
        return self.ids.get(token)

    def without_special(self):
        return self


def plain_bytes_as_tokens():
    """Token i is byte i of the byte-level alphabet; there are no merges."""
    rules = ByteRules()
    return Tokenizer(rules, spelling=Spelling(rules.tokens, frozenset()))
