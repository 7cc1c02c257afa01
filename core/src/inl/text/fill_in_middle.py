"""Fill-in-the-middle prompts: prefix and suffix as a model was trained on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from inl.errors import RequestError
from inl.text.measure import check_length

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

FAMILIES: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
"""Tokens before prefix, suffix and middle. Without one for the middle, the suffix comes
first, and the middle continues the prefix."""

REPOSITORIES: Final = ("<|repo_name|>", "<repo_name>")
FILES: Final = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
PADS: Final = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
ENDS: Final = ("▁<EOT>", "<EOT>")

REPOSITORY_NAME: Final = "repository"
"""Of other files, whose own is not known."""

MARK: Final = "☺"
"""Precedes a text that must not begin with an implicit space; no other joins it."""

PROBE: Final = "a"

GGUF_KEYS: Final = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
    "pad": ("fim_pad",),
}
"""Fields of ``tokenizer.ggml.*_token_id``, the second of an older form."""


class FillTokens(NamedTuple):
    """Ids of the tokens of a fill-in-the-middle prompt; ``None``: there is none."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: frozenset[int]
    """Tokens that end the middle, beside those that end any text."""


def fill_tokens(tokenizer: Tokenizer) -> FillTokens | None:
    """Return the tokens of a vocabulary; ``None`` if it has none for the purpose.

    Ids that the model's file names precede those found by their text.
    """
    named = tokenizer.fill_ids
    family = next(
        (
            each
            for each in FAMILIES
            if all(tokenizer.token_id(text) is not None for text in each if text)
        ),
        ("", "", ""),
    )
    found = dict(named)
    for name, text in zip(("prefix", "suffix", "middle"), family, strict=True):
        if name not in found and (index := _first(tokenizer, (text,))) is not None:
            found[name] = index
    if not {"prefix", "suffix"} <= set(found):
        return None
    for name, texts in (("repository", REPOSITORIES), ("file", FILES), ("pad", PADS)):
        if name not in found and (index := _first(tokenizer, texts)) is not None:
            found[name] = index
    ends = {*found.values()}
    if (end := _first(tokenizer, ENDS)) is not None:
        ends.add(end)
    return FillTokens(
        found["prefix"],
        found["suffix"],
        found.get("middle"),
        found.get("repository"),
        found.get("file"),
        frozenset(ends),
    )


def _first(tokenizer: Tokenizer, texts: Iterable[str]) -> int | None:
    ids = (tokenizer.token_id(text) for text in texts if text)
    return next((index for index in ids if index is not None), None)


def needed_tokens(tokenizer: Tokenizer) -> FillTokens:
    """Return the tokens; raises ``RequestError`` if there are none."""
    tokens = fill_tokens(tokenizer)
    if tokens is None:
        raise RequestError(
            "suffix: the model's vocabulary has no fill-in-the-middle tokens; accepts "
            "models that were trained with them, such as Qwen2.5-Coder, StarCoder, "
            "CodeLlama, DeepSeek-Coder and Codestral"
        )
    return tokens


def fill_ids(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    *,
    context: int,
) -> list[int]:
    """Return the token ids of a prompt whose continuation fills the gap.

    Control tokens that the texts contain are text. files: names and texts of other
    files, which precede the prefix. context: maximum number of tokens. Raises
    :class:`~inl.errors.RequestError` for a vocabulary without such tokens, and
    ``PromptTooLong``.
    """
    tokens = needed_tokens(tokenizer)
    check_length(tokenizer, "".join([prefix, suffix, *map("".join, files)]), context)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, False, plain=True)

    before = [tokens.prefix, *ids(prefix)]
    after = [tokens.suffix, *_inner_ids(tokenizer, suffix)]
    if tokens.middle is None:
        prompt = [*after, *before]
    else:
        prompt = [*before, *after, tokens.middle]
    begin = _begin_ids(tokenizer)
    return [*begin, *_file_ids(tokenizer, tokens, files), *prompt]


def _begin_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens with which every text begins."""
    framed, plain = tokenizer.encode(PROBE), tokenizer.encode(PROBE, False)
    count = len(plain)
    starts = range(len(framed) - count + 1)
    at = next((at for at in starts if framed[at : at + count] == plain), 0)
    return framed[:at]


def _inner_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text without the space that some vocabularies put before a text."""
    ids = tokenizer.encode(text, False, plain=True)
    if not tokenizer.marks_spaces:
        return ids
    mark = tokenizer.encode(MARK, False, plain=True)
    marked = tokenizer.encode(MARK + text, False, plain=True)
    return marked[len(mark) :] if marked[: len(mark)] == mark else ids


def _file_ids(
    tokenizer: Tokenizer, tokens: FillTokens, files: Sequence[tuple[str, str]]
) -> list[int]:
    """Encode other files, as repositories were in training where tokens exist."""
    found: list[int] = []
    if files and None not in (tokens.repository, tokens.file):
        repository = tokenizer.encode(f"{REPOSITORY_NAME}\n", False, plain=True)
        found += [tokens.repository or 0, *repository]
    for name, text in files:
        found += [] if tokens.file is None else [tokens.file]
        found += tokenizer.encode(f"{name}\n{text}\n", False, plain=True)
    return found


def read_fill_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids that GGUF metadata names, by the fields of :class:`FillTokens`.

    ids: of ``tokenizer.ggml.*_token_id``, by the part that the star stands for.
    """
    return {
        name: ids[key]
        for name, keys in GGUF_KEYS.items()
        for key in reversed(keys)
        if key in ids
    }
