"""SentencePiece BPE: merges the adjacent pair whose token has the best score.

A space is U+2581; a character outside the vocabulary falls back to byte tokens.
https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inl.text.tokenizer import BYTE_TOKEN, guarded, library

SPACE: Final = "\u2581"

MAX_PIECE: Final = 128
"""Longest merged token in characters; trainers allow 16 to 64."""


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
    lib = library()
    model = guarded(
        lib.models.BPE,
        vocab=dict(vocabulary),
        merges=merges(scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(map(BYTE_TOKEN.fullmatch, vocabulary)),
        where=f"{where}: tokenizer.ggml.tokens",
        accepted="a valid BPE vocabulary",
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
    return [
        (token[:cut], token[cut:])
        for token in ranked
        if len(token) <= MAX_PIECE
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in scores and token[cut:] in scores
    ]
