"""A tokenizer out of GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from inl.errors import MissingPackage
from inl.text.gguf_fields import CONTROL, NORMAL, USER_DEFINED, Fields
from inl.text.pre_tokenizers import (
    BEGINS_WITH_BOS,
    COMPOSED,
    PATTERNS,
    PRE,
    WHOLE_WORDS,
    pre_tokenizer,
)
from inl.text.scored_bpe import scored_bpe
from inl.text.tokenizer import Spelling, Tokenizer, guarded, library

if TYPE_CHECKING:
    from inl.text.plain_bpe import PlainBpe

KINDS: Final = "gpt2 (byte-level BPE), llama (SentencePiece BPE)"
MERGES: Final = "merges of tokens that are in tokenizer.ggml.tokens"


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
    bos, eos = fields.token("bos", tokens), fields.token("eos", tokens)
    return Tokenizer(
        _rules(fields, kind, tokens, bos, eos),
        where=where,
        bos_token=bos,
        eos_token=eos,
    )


def open_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """As :func:`read_tokenizer`, but put off what only text to encode needs.

    Building the rules of a byte-level vocabulary takes a tenth of a second, and turning
    ids into text takes none of them. What is wrong with its merges is said then.
    """
    fields = Fields(metadata, where)
    tokens = fields.strings("tokens")
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return read_tokenizer(metadata, where)
    _pre(fields)
    kinds, ends = fields.types(len(tokens)), fields.ends(tokens)
    bos, eos = fields.token("bos", tokens), fields.token("eos", tokens)
    special = {index for index, kind in enumerate(kinds) if kind == CONTROL}
    return Tokenizer(
        lambda: _to_hand(fields, tokens, bos, eos),
        where=where,
        bos_token=bos,
        eos_token=eos,
        spelling=Spelling(tokens, frozenset(special | set(ends))),
    )


def _to_hand(fields: Fields, tokens: Sequence[str], bos: str, eos: str) -> Any:
    """Rules of a byte-level vocabulary, by the library where it is installed."""
    try:
        library()
    except MissingPackage:
        return _plain(fields, tokens, bos, eos)
    return _rules(fields, "gpt2", tokens, bos, eos)


def _plain(fields: Fields, tokens: Sequence[str], bos: str, eos: str) -> PlainBpe:
    """The same rules in Python."""
    from inl.text.plain_bpe import Frame, PlainBpe

    vocabulary, name = _indexed(fields, tokens), _pre(fields)
    control, shown = _added(fields, tokens)
    before, after = _ends(fields, bos, eos, begins=name in BEGINS_WITH_BOS)
    found: PlainBpe = guarded(
        PlainBpe,
        vocabulary,
        _merges(fields),
        PATTERNS[PRE[name]],
        added=[*control, *shown],
        special=[vocabulary[token] for token in control],
        frame=Frame(*([vocabulary[each]] if each else [] for each in (before, after))),
        whole_words=name in WHOLE_WORDS,
        composed=name in COMPOSED,
        where=f"{fields.where}: tokenizer.ggml.merges",
        accepted=MERGES,
    )
    return found


def _rules(fields: Fields, kind: str, tokens: Sequence[str], bos: str, eos: str) -> Any:
    vocabulary = _indexed(fields, tokens)
    if kind == "llama":
        rules, begins = _scored(fields, tokens, vocabulary), True
    else:
        rules, begins = _byte_level(fields, vocabulary)
    _add_tokens(rules, fields, tokens)
    _frame(rules, fields, vocabulary, bos, eos, begins=begins)
    return rules


def _indexed(fields: Fields, tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(
            token for index, token in enumerate(tokens) if vocabulary[token] != index
        )
        fields.refuse("tokens", f"{twice!r:.60} twice", "each token once")
    return vocabulary


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in fields.strings("merges")]
    odd = next((merge for merge in merges if len(merge) != 2), None)
    if odd is not None:
        shown = f"{' '.join(odd)!r:.60}"
        fields.refuse("merges", shown, "two tokens with a space between")
    return cast("list[tuple[str, str]]", merges)


def _byte_level(fields: Fields, vocabulary: dict[str, int]) -> tuple[Any, bool]:
    """Byte-level BPE, and whether its texts begin with the first token."""
    lib = library()
    name = _pre(fields)
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


def _pre(fields: Fields) -> str:
    """Name of the rules that cut a text into words."""
    name: str = fields.get("pre", str, "a name", "default")
    if name not in PRE:
        fields.refuse("pre", f"{name!r:.60}", ", ".join(PRE))
    return name


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
    added = library().AddedToken
    control, shown = _added(fields, tokens)
    rules.add_special_tokens([added(one, normalized=False) for one in control])
    rules.add_tokens([added(one, normalized=False) for one in shown])


def _added(fields: Fields, tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tokens that are found in a text before it is cut: control ones are not shown."""
    kinds = fields.types(len(tokens))
    ends = set(fields.ends(tokens).values())
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
    return control, shown


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
    before, after = _ends(fields, bos, eos, begins=begins)
    used = [token for token in (before, after) if token]
    if used:
        rules.post_processor = library().processors.TemplateProcessing(
            single=[*([before] if before else []), "$A", *([after] if after else [])],
            special_tokens=[
                (token, vocabulary[token]) for token in dict.fromkeys(used)
            ],
        )


def _ends(fields: Fields, bos: str, eos: str, *, begins: bool) -> tuple[str, str]:
    """Tokens that a text begins and ends with, empty where it does with none."""
    before = bos if fields.flag("add_bos_token", begins and bool(bos)) else ""
    return before, eos if fields.flag("add_eos_token", False) else ""
