"""Tokenizer construction from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.errors import MissingPackage
from inl.text.fill_in_middle import GGUF_KEYS, read_fill_ids
from inl.text.gguf_fields import CONTROL, NORMAL, USER_DEFINED, Fields
from inl.text.pre_tokenizers import (
    BEGINS_WITH_BOS,
    COMPOSED,
    PATTERNS,
    PRE,
    WHOLE_WORDS,
    pre_tokenizer,
)
from inl.text.scored_bpe import piece_bpe, scored_bpe
from inl.text.tokenizer import Spelling, Tokenizer, guarded, library

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.text.plain_bpe import PlainBpe

KINDS: Final = (
    "gpt2 (byte-level BPE), llama (SentencePiece BPE), gemma4 (BPE with bytes)"
)
MERGED_PIECES: Final = "gemma4"
"""Pieces as of SentencePiece, with a list of merges in place of scores."""
MAX_TOKENS: Final = 1 << 20
"""Limit of a vocabulary; the largest have 2**18."""
MERGED: Final = NORMAL, USER_DEFINED
"""Types of the tokens that scored merges may produce."""
MERGES: Final = "merges whose tokens are all in tokenizer.ggml.tokens"


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer that ``tokenizer.ggml.*`` describes.

    Raises :class:`CheckpointError` that names the field: an unknown model or
    pre-tokenizer, lists of different lengths, an id out of range.
    """
    fields = Fields(metadata, where)
    kind, tokens = _kind(fields), fields.strings("tokens")
    bos, eos = fields.token("bos", tokens), fields.token("eos", tokens)
    return Tokenizer(
        _rules(fields, kind, tokens, bos, eos),
        where=where,
        bos_token=bos,
        eos_token=eos,
        fill_ids=_fill_ids(fields, len(tokens)),
    )


def open_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer lazily; otherwise as :func:`read_tokenizer`.

    Rules are built, and checked, at the first :meth:`Tokenizer.encode`: those of a
    byte-level vocabulary take 0.1 s, and decoding does not need them.
    """
    fields = Fields(metadata, where)
    kind, tokens = _kind(fields), fields.strings("tokens")
    bos, eos = fields.token("bos", tokens), fields.token("eos", tokens)
    types, delimiters = fields.types(len(tokens)), fields.delimiters(tokens)
    special = frozenset((*_of_kind(types, CONTROL), *delimiters))
    if kind == "gpt2":
        _pre_tokenizer_name(fields)  # raises for an unknown one
        build, decode = _byte_level_rules, None
    elif kind == MERGED_PIECES:
        build, decode = _merged_rules, _piece_decoder(fields, tokens, special)
    else:
        build, decode = _plain_scored, _piece_decoder(fields, tokens, special)
    return Tokenizer(
        lambda: build(fields, tokens, bos, eos),
        where=where,
        bos_token=bos,
        eos_token=eos,
        spelling=Spelling(tokens, special, decode),
        fill_ids=_fill_ids(fields, len(tokens)),
    )


def _fill_ids(fields: Fields, count: int) -> dict[str, int]:
    """Return the ids of fill-in-the-middle tokens that the file names."""
    keys = {key for keys in GGUF_KEYS.values() for key in keys}
    return read_fill_ids(
        {
            key: fields.index(f"{key}_token_id", count)
            for key in keys
            if f"tokenizer.ggml.{key}_token_id" in fields.metadata
        }
    )


def _kind(fields: Fields) -> str:
    """Return ``tokenizer.ggml.model``."""
    kind: str = fields.get("model", str, "a name")
    if kind not in ("gpt2", "llama", MERGED_PIECES):
        fields.refuse("model", f"{kind!r:.60}", KINDS)
    return kind


def _byte_level_rules(fields: Fields, tokens: Sequence[str], bos: str, eos: str) -> Any:
    """Build byte-level BPE, in Python if ``tokenizers`` is not installed."""
    try:
        library()
    except MissingPackage:
        return _plain_bpe(fields, tokens, bos, eos)
    return _rules(fields, "gpt2", tokens, bos, eos)


def _plain_bpe(fields: Fields, tokens: Sequence[str], bos: str, eos: str) -> PlainBpe:
    """Build byte-level BPE in Python."""
    from inl.text.plain_bpe import PlainBpe
    from inl.text.plain_rules import TextFrame

    vocabulary, name = _token_ids(fields, tokens), _pre_tokenizer_name(fields)
    control, visible = _added_tokens(fields, tokens)
    frame = _frame_tokens(fields, bos, eos, begins=name in BEGINS_WITH_BOS)
    bpe: PlainBpe = guarded(
        PlainBpe,
        vocabulary,
        _merges(fields),
        PATTERNS[PRE[name]],
        added=[*control, *visible],
        special=[vocabulary[token] for token in control],
        frame=TextFrame(*([vocabulary[one]] if one else [] for one in frame)),
        whole_words=name in WHOLE_WORDS,
        composed=name in COMPOSED,
        where=f"{fields.where}: tokenizer.ggml.merges",
        accepted=MERGES,
    )
    return bpe


def _piece_decoder(
    fields: Fields, tokens: Sequence[str], special: frozenset[int]
) -> Callable[[Sequence[int], bool], str]:
    """Return the decoder of SentencePiece's tokens; checks the fields of encoding."""
    from inl.text.piece_decoder import PieceDecoder

    fields.scores(len(tokens))
    fields.token("unknown", tokens, 0)
    strip = fields.flag("add_space_prefix", True)
    return PieceDecoder(tokens, special, strip).decode


def _merged_rules(fields: Fields, tokens: Sequence[str], bos: str, eos: str) -> Any:
    """Build BPE with bytes; it needs ``tokenizers``."""
    return _rules(fields, MERGED_PIECES, tokens, bos, eos)


def _plain_scored(fields: Fields, tokens: Sequence[str], bos: str, eos: str) -> Any:
    """Build SentencePiece BPE in Python, which leaves long texts to ``tokenizers``.

    Those of a vocabulary with unusually long added tokens are built by the latter.
    """
    from inl.text.plain_rules import TextFrame
    from inl.text.plain_scored import PlainScored

    texts = list(tokens)
    vocabulary, types = _token_ids(fields, texts), fields.types(len(texts)).tolist()
    scores = zip(fields.scores(len(texts)).tolist(), types, strict=True)
    control, visible = _added_tokens(fields, texts)
    frame = _frame_tokens(fields, bos, eos, begins=True)
    rules = PlainScored(
        texts,
        [score if kind in MERGED else None for score, kind in scores],
        ids=vocabulary,
        unknown=fields.token("unknown", texts, 0),
        space_prefix=fields.flag("add_space_prefix", True),
        special=[vocabulary[token] for token in control],
        visible=[vocabulary[token] for token in visible],
        frame=TextFrame(*([vocabulary[one]] if one else [] for one in frame)),
        long=lambda: _rules(fields, "llama", texts, bos, eos),
    )
    return rules if rules.fast else _rules(fields, "llama", texts, bos, eos)


def _rules(fields: Fields, kind: str, tokens: Sequence[str], bos: str, eos: str) -> Any:
    """Build a ``tokenizers.Tokenizer``; ``kind`` is one of :data:`KINDS`."""
    vocabulary = _token_ids(fields, tokens)
    if kind == "llama":
        rules, begins = _scored(fields, tokens, vocabulary), True
    elif kind == MERGED_PIECES:
        rules, begins = _merged(fields, tokens, vocabulary), True
    else:
        rules, begins = _byte_level(fields, vocabulary)
    _add_tokens(rules, fields, tokens)
    _add_frame(rules, fields, vocabulary, bos, eos, begins=begins)
    return rules


def _token_ids(fields: Fields, tokens: Sequence[str]) -> dict[str, int]:
    """Return token -> id; refuses duplicates and more than MAX_TOKENS."""
    if len(tokens) > MAX_TOKENS:
        fields.refuse("tokens", f"{len(tokens)} tokens", f"at most {MAX_TOKENS}")
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocabulary) != len(tokens):
        duplicate = next(
            token for index, token in enumerate(tokens) if vocabulary[token] != index
        )
        fields.refuse("tokens", f"{duplicate!r:.60} twice", "each token once")
    return vocabulary


def _merges(fields: Fields) -> list[tuple[str, str]]:
    stored = fields.strings("merges")
    if len(stored) > MAX_TOKENS:
        fields.refuse("merges", f"{len(stored)} merges", f"at most {MAX_TOKENS}")
    merges = list(stored)
    if set(map(str.count, merges, repeat(" "))) - {1}:
        invalid = next(merge for merge in merges if merge.count(" ") != 1)
        fields.refuse("merges", f"{invalid!r:.60}", "two tokens with a space between")
    tokens = " ".join(merges).split(" ")
    return list(zip(tokens[::2], tokens[1::2], strict=False))


def _byte_level(fields: Fields, vocabulary: dict[str, int]) -> tuple[Any, bool]:
    """Build byte-level BPE; also returns whether texts begin with BOS by default."""
    lib = library()
    name = _pre_tokenizer_name(fields)
    model = guarded(
        lib.models.BPE,
        vocab=vocabulary,
        merges=_merges(fields),
        ignore_merges=name in WHOLE_WORDS,
        where=f"{fields.where}: tokenizer.ggml.merges",
        accepted=MERGES,
    )
    rules = lib.Tokenizer(model)
    if name in COMPOSED:
        rules.normalizer = lib.normalizers.NFC()
    rules.pre_tokenizer = pre_tokenizer(name)
    rules.decoder = lib.decoders.ByteLevel()
    return rules, name in BEGINS_WITH_BOS


def _pre_tokenizer_name(fields: Fields) -> str:
    """Return ``tokenizer.ggml.pre``, a key of PRE."""
    name: str = fields.get("pre", str, "a name", "default")
    if name not in PRE:
        fields.refuse("pre", f"{name!r:.60}", ", ".join(PRE))
    return name


def _scored(
    fields: Fields, tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> Any:
    """Build SentencePiece BPE; merges never produce control, byte or unused tokens."""
    types = fields.types(len(tokens)).tolist()
    scores = fields.scores(len(tokens)).tolist()
    return scored_bpe(
        vocabulary,
        {
            token: score
            for token, kind, score in zip(tokens, types, scores, strict=True)
            if kind in MERGED
        },
        unknown=fields.token("unknown", tokens, 0),
        space_prefix=fields.flag("add_space_prefix", True),
        where=fields.where,
    )


def _merged(
    fields: Fields, tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> Any:
    """Build BPE over texts whose spaces are U+2581, with bytes for other characters."""
    return piece_bpe(
        vocabulary,
        _merges(fields),
        unknown=fields.token("unknown", tokens, 0),
        space_prefix=fields.flag("add_space_prefix", False),
        where=f"{fields.where}: tokenizer.ggml.merges",
        accepted=MERGES,
    )


def _add_tokens(rules: Any, fields: Fields, tokens: Sequence[str]) -> None:
    added = library().AddedToken
    control, visible = _added_tokens(fields, tokens)
    rules.add_special_tokens([added(one, normalized=False) for one in control])
    rules.add_tokens([added(one, normalized=False) for one in visible])


def _added_tokens(fields: Fields, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the control tokens and the visible tokens that are split off first."""
    types = fields.types(len(tokens))
    special = {*_of_kind(types, CONTROL), *fields.delimiters(tokens)}
    control = [tokens[index] for index in sorted(special)]
    defined = _of_kind(types, USER_DEFINED)
    visible = [tokens[index] for index in defined if index not in special]
    if "" in control or "" in visible:
        fields.refuse("tokens", "an empty control token", "control tokens with a text")
    return control, visible


def _of_kind(types: NDArray[Any], kind: int) -> list[int]:
    """Return the ids of the tokens of a kind."""
    found: list[int] = np.flatnonzero(types == kind).tolist()
    return found


def _add_frame(
    rules: Any,
    fields: Fields,
    vocabulary: Mapping[str, int],
    bos: str,
    eos: str,
    *,
    begins: bool,
) -> None:
    """Set the tokens that are added around a text."""
    before, after = _frame_tokens(fields, bos, eos, begins=begins)
    used = [token for token in (before, after) if token]
    if used:
        rules.post_processor = library().processors.TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[
                (token, vocabulary[token]) for token in dict.fromkeys(used)
            ],
        )


def _frame_tokens(
    fields: Fields, bos: str, eos: str, *, begins: bool
) -> tuple[str, str]:
    """Return the tokens added before and after a text; empty for none."""
    before = bos if fields.flag("add_bos_token", begins and bool(bos)) else ""
    return before, eos if fields.flag("add_eos_token", False) else ""
