"""SentencePiece BPE: merges the adjacent pair whose token has the best score.

A space is U+2581; a character outside the vocabulary falls back to byte tokens.
https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inl.errors import CheckpointError
from inl.text.tokenizer import BYTE_TOKEN, SPACE, guarded, library

MAX_PIECE: Final = 128
"""Longest merged token in characters; trainers allow 16 to 64."""
MAX_SPLITS: Final = 1 << 22
"""Limit of the splits of all tokens that are tried; Gemma 3 has 1.6 million."""
MAX_MERGES: Final = 1 << 20
"""Limit of the merges that result; Gemma 3 has 515,000."""


def scored_bpe(
    vocabulary: Mapping[str, int],
    scores: Mapping[str, float],
    *,
    unknown: str,
    space_prefix: bool,
    where: str,
) -> Any:
    """Build a ``tokenizers.Tokenizer``.

    scores: score of each token that merges may produce. unknown: token for characters
    that cannot be encoded. space_prefix: whether encoding adds a leading space, which
    decoding removes.
    """
    return piece_bpe(
        vocabulary,
        _bounded_merges(scores, where),
        unknown=unknown,
        space_prefix=space_prefix,
        where=f"{where}: tokenizer.ggml.tokens",
        accepted="a valid BPE vocabulary",
    )


def piece_bpe(
    vocabulary: Mapping[str, int],
    ranked: list[tuple[str, str]],
    *,
    unknown: str,
    space_prefix: bool,
    where: str,
    accepted: str,
) -> Any:
    """Build a ``tokenizers.Tokenizer`` of merges, the first the best.

    where, accepted: for the error about merges that do not fit the vocabulary.
    """
    lib = library()
    model = guarded(
        lib.models.BPE,
        vocab=dict(vocabulary),
        merges=ranked,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(map(BYTE_TOKEN.fullmatch, vocabulary)),
        where=where,
        accepted=accepted,
    )
    rules = lib.Tokenizer(model)
    spaces = lib.normalizers.Replace(" ", SPACE)
    prefix = [lib.normalizers.Prepend(SPACE)] if space_prefix else []
    rules.normalizer = lib.normalizers.Sequence([*prefix, spaces])
    strip = [lib.decoders.Strip(" ", 1, 0)] if space_prefix else []
    rules.decoder = lib.decoders.Sequence(
        [
            lib.decoders.Replace(SPACE, " "),
            lib.decoders.ByteFallback(),
            lib.decoders.Fuse(),
            *strip,
        ]
    )
    return rules


def merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Convert scores to ranked merges: every split of every token, best score first.

    Tokens of equal score rank in the order of ``scores``.
    """
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    pieces = {token: token for token in scores}  # merges share the tokens' objects
    return [
        (left, right)
        for token in ranked
        if len(token) <= MAX_PIECE
        for cut in range(len(token) - 1, 0, -1)
        if (left := pieces.get(token[:cut])) and (right := pieces.get(token[cut:]))
    ]


def _bounded_merges(scores: Mapping[str, float], where: str) -> list[tuple[str, str]]:
    """:func:`merges`, if there are not too many to try or to store."""
    splits = sum(len(token) for token in scores if len(token) <= MAX_PIECE)
    found = merges(scores) if splits <= MAX_SPLITS else []
    if splits > MAX_SPLITS or len(found) > MAX_MERGES:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.tokens: found tokens of {splits} characters with "
            f"{len(found) or 'unknown'} merges; accepted: up to {MAX_SPLITS} and "
            f"{MAX_MERGES}"
        )
    return found
