"""A tokenizer out of GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from inl.errors import CheckpointError
from inl.text.pre_tokenizers import (
    BEGINS_WITH_BOS,
    COMPOSED,
    PRE,
    WHOLE_WORDS,
    pre_tokenizer,
)
from inl.text.scored_bpe import scored_bpe
from inl.text.tokenizer import Tokenizer, guarded, library

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of ``tokenizer.ggml.token_type``."""

KINDS: Final = "gpt2 (byte-level BPE), llama (SentencePiece BPE)"


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer that ``tokenizer.ggml.*`` describes.

    Raises :class:`CheckpointError` that names the field: a kind of vocabulary or a
    pre-tokenizer that is not known, lists that do not fit together, an id out of range.
    """
    fields = Fields(metadata, where)
    kind = fields.get("model", str, "a name")
    if kind not in ("gpt2", "llama"):
        fields.refuse("model", f"{kind!r:.60}", KINDS)
    tokens = fields.strings("tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(
            token for index, token in enumerate(tokens) if vocabulary[token] != index
        )
        fields.refuse("tokens", f"{twice!r:.60} twice", "each token once")
    if kind == "llama":
        rules, begins = _scored(fields, tokens, vocabulary), True
    else:
        rules, begins = _byte_level(fields, vocabulary)
    bos, eos = fields.token("bos", tokens), fields.token("eos", tokens)
    _add_tokens(rules, fields, tokens)
    _frame(rules, fields, vocabulary, bos, eos, begins=begins)
    return Tokenizer(rules, where=where, bos_token=bos, eos_token=eos)


class Fields:
    """``tokenizer.ggml.*`` with checked types."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def refuse(self, key: str, found: str, accepted: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where}: tokenizer.ggml.{key}: found {found}; accepted: {accepted}"
        )

    def get(self, key: str, kind: type, accepted: str, default: Any = None) -> Any:
        found = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if type(found) is not kind:
            self.refuse(key, "nothing" if found is None else f"{found!r:.60}", accepted)
        return found

    def strings(self, key: str) -> list[str]:
        found: list[Any] = self.get(key, list, "strings")
        if not all(type(one) is str for one in found):
            self.refuse(key, "other values than strings", "strings")
        return found

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, "true or false", default))

    def token(
        self, name: str, tokens: Sequence[str], default: int | None = None
    ) -> str:
        """Return the text of a special token; empty where the file names none."""
        key = f"{name}_token_id"
        if default is None and f"tokenizer.ggml.{key}" not in self.metadata:
            return ""
        index: int = self.get(key, int, "an id", default)
        if not 0 <= index < len(tokens):
            self.refuse(key, str(index), f"an id below {len(tokens)}")
        return tokens[index]

    def types(self, count: int) -> list[int]:
        found = self.numbers("token_type", [NORMAL] * count)
        odd = [one for one in found if one not in range(7)]
        if odd:
            self.refuse("token_type", f"{odd[0]!r:.60}", "0 to 6")
        return found

    def scores(self, count: int) -> list[float]:
        found = self.numbers("scores", None, count)
        odd = [one for one in found if type(one) is not float or math.isnan(one)]
        if odd:
            self.refuse("scores", f"{odd[0]!r:.60}", "numbers")
        return found

    def numbers(
        self, key: str, default: list[Any] | None, count: int | None = None
    ) -> list[Any]:
        """A list with an entry for each token."""
        found: list[Any] = self.get(key, list, "numbers", default)
        count = len(default) if default is not None else count
        if len(found) != count:
            self.refuse(key, f"{len(found)} entries", f"{count}, one for each token")
        return found


def _byte_level(fields: Fields, vocabulary: dict[str, int]) -> tuple[Any, bool]:
    """Byte-level BPE, and whether its texts begin with the first token."""
    lib = library()
    name = fields.get("pre", str, "a name", "default")
    if name not in PRE:
        fields.refuse("pre", f"{name!r:.60}", ", ".join(PRE))
    merges = [tuple(merge.split(" ")) for merge in fields.strings("merges")]
    odd = next((merge for merge in merges if len(merge) != 2), None)
    if odd is not None:
        shown = f"{' '.join(odd)!r:.60}"
        fields.refuse("merges", shown, "two tokens with a space between")
    model = guarded(
        lib.models.BPE,
        vocab=vocabulary,
        merges=merges,
        ignore_merges=name in WHOLE_WORDS,
        where=f"{fields.where}: tokenizer.ggml.merges",
        accepted="merges of tokens that are in tokenizer.ggml.tokens",
    )
    rules = lib.Tokenizer(model)
    if name in COMPOSED:
        rules.normalizer = lib.normalizers.NFC()
    rules.pre_tokenizer = pre_tokenizer(name)
    rules.decoder = lib.decoders.ByteLevel()
    return rules, name in BEGINS_WITH_BOS


def _scored(
    fields: Fields, tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> Any:
    """SentencePiece BPE; control, byte and unused tokens never come from merging."""
    kinds, scores = fields.types(len(tokens)), fields.scores(len(tokens))
    return scored_bpe(
        vocabulary,
        {
            token: score
            for token, kind, score in zip(tokens, kinds, scores, strict=True)
            if kind in (NORMAL, USER_DEFINED)
        },
        unknown=fields.token("unknown", tokens, 0),
        space_prefix=fields.flag("add_space_prefix", True),
        where=fields.where,
    )


def _add_tokens(rules: Any, fields: Fields, tokens: Sequence[str]) -> None:
    """Tokens that are found in a text before it is cut; control ones are not shown."""
    added = library().AddedToken
    kinds = fields.types(len(tokens))
    ends = {fields.token(name, tokens) for name in ("bos", "eos", "eot", "eom")} - {""}
    control = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == CONTROL or token in ends
    ]
    shown = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == USER_DEFINED and token not in ends
    ]
    if "" in control or "" in shown:
        fields.refuse("tokens", "an empty control token", "control tokens with a text")
    rules.add_special_tokens([added(one, normalized=False) for one in control])
    rules.add_tokens([added(one, normalized=False) for one in shown])


def _frame(
    rules: Any,
    fields: Fields,
    vocabulary: Mapping[str, int],
    bos: str,
    eos: str,
    *,
    begins: bool,
) -> None:
    """Set what a text begins and ends with."""
    before = bos if fields.flag("add_bos_token", begins and bool(bos)) else ""
    after = eos if fields.flag("add_eos_token", False) else ""
    used = [token for token in (before, after) if token]
    if used:
        rules.post_processor = library().processors.TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[
                (token, vocabulary[token]) for token in dict.fromkeys(used)
            ],
        )
