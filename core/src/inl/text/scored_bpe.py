"""SentencePiece's BPE: neighbors that form the token of the best score are merged.

Spaces are spelled U+2581, and a character that the vocabulary lacks is spelled in
bytes. https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inl.text.tokenizer import BYTE_TOKEN, guarded, library

SPACE: Final = "\u2581"

MAX_PIECE: Final = 128
"""Characters of the longest token that is put together; trainers allow 16 to 64."""


def scored_bpe(
    vocabulary: Mapping[str, int],
    scores: Mapping[str, float],
    *,
    unknown: str,
    space_prefix: bool,
    where: str,
) -> Any:
    """Build the rules.

    ``scores`` has the tokens that merging may give. ``unknown`` stands for what cannot
    be spelled; with ``space_prefix`` a text begins with a space that decoding drops.
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
        accepted="tokens that a tokenizer can be made of",
    )
    rules = lib.Tokenizer(model)
    spell = lib.normalizers.Replace(" ", SPACE)
    prefix = [lib.normalizers.Prepend(SPACE)] if space_prefix else []
    rules.normalizer = lib.normalizers.Sequence([*prefix, spell])
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
    """Write scores as merges: every way to put a token together, best tokens first.

    Of equal scores the token that comes first in ``scores`` is the better one.
    """
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        if len(token) <= MAX_PIECE
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in scores and token[cut:] in scores
    ]
