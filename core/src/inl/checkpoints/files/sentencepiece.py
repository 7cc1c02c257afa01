"""Reader of tokenizer.model: a SentencePiece vocabulary, as metadata of GGUF files.

A protocol buffer (sentencepiece_model.proto): the pieces with their scores and types,
whose numbers GGUF files have too, and the specs of trainer and normalizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import count as count_from
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.text.gguf_fields import CONTROL, NORMAL, USER_DEFINED
from inl.text.gguf_vocabulary import MAX_TOKENS

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

MAX_FIELDS: Final = 1 << 10
"""Limit of the fields of a piece or spec; real ones have at most 50."""
PIECE, TRAINER, NORMALIZER = 1, 2, 3
"""Fields of the model."""
TEXT, SCORE, TYPE = 1, 2, 3
"""Fields of a piece."""
MODEL_TYPE, BPE = 3, 2
"""Field of the trainer, and the only kind that is read."""
SPECIAL_IDS: Final = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2)}
"""Field of the trainer and default id of each special token."""
CHARACTER_MAP, DUMMY_PREFIX, REMOVES_SPACES = 2, 3, 4
"""Fields of the normalizer."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of a field."""
NONE: Final = (1 << 64) - 1
"""-1 as a field stores it: the vocabulary has no such token."""


def parse_sentencepiece(
    data: bytes,
    where: str,
    added: Mapping[int, tuple[str, bool]],
    frame: Mapping[str, bool],
) -> Tokenizer:
    """Build the tokenizer of SentencePiece BPE; raises :class:`CheckpointError`.

    added: text of further tokens and whether they are special, by id. frame: values of
    ``add_bos_token`` and ``add_eos_token``.
    """
    from inl.text.gguf_vocabulary import open_tokenizer

    metadata = _metadata(data, added, where)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in frame.items()}
    return open_tokenizer(metadata, where)


def _metadata(
    data: bytes, added: Mapping[int, tuple[str, bool]], where: str
) -> dict[str, Any]:
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    specs: dict[int, dict[int, Any]] = {TRAINER: {}, NORMALIZER: {}}
    for field, value in _fields(data, where, MAX_TOKENS):
        if field == PIECE:
            piece = dict(_fields(value, where, MAX_FIELDS))
            texts.append(_text(piece.get(TEXT), where))
            scores.append(_score(piece.get(SCORE, b"\0\0\0\0"), where))
            types.append(piece.get(TYPE, NORMAL))
        elif field in specs:
            specs[field] = dict(_fields(value, where, MAX_FIELDS))
    _check(specs[TRAINER], specs[NORMALIZER], where)
    for index, (text, special) in sorted(added.items()):
        if index < len(texts):
            texts[index], types[index] = text, CONTROL if special else types[index]
        elif index > len(texts):
            raise CheckpointError(
                f"{where}: found {len(texts)} tokens and an added one of id {index}; "
                "accepted: ids without a hole"
            )
        else:
            texts.append(text)
            scores.append(0.0)
            types.append(CONTROL if special else USER_DEFINED)
    ids = {
        f"{name}_token_id": value
        for name, (field, default) in SPECIAL_IDS.items()
        if (value := specs[TRAINER].get(field, default)) != NONE
    }
    fields = {
        "model": "llama", "tokens": texts, "scores": scores, "token_type": types,
        "add_space_prefix": bool(specs[NORMALIZER].get(DUMMY_PREFIX, True)), **ids,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def _check(
    trainer: Mapping[int, Any], normalizer: Mapping[int, Any], where: str
) -> None:
    """Raise for options that change the tokens of a text and are not implemented."""
    kind = trainer.get(MODEL_TYPE, 1)
    if kind != BPE:
        raise CheckpointError(
            f"{where}: trainer_spec.model_type: found {show(kind)}; accepted: {BPE}, "
            "which is BPE, or a tokenizer.json"
        )
    if normalizer.get(CHARACTER_MAP):
        raise CheckpointError(
            f"{where}: normalizer_spec.precompiled_charsmap: found a map; accepted: "
            "none, or a tokenizer.json"
        )
    if normalizer.get(REMOVES_SPACES, True):
        raise CheckpointError(
            f"{where}: normalizer_spec.remove_extra_whitespaces: found true; accepted: "
            "false, or a tokenizer.json"
        )


def _fields(data: Any, where: str, most: int) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message: an integer, or bytes."""
    at = 0
    try:
        if not isinstance(data, bytes):
            raise IndexError
        for count in count_from(1):
            if at == len(data):
                return
            if count > most:
                raise CheckpointError(
                    f"{where}: a message: found over {most} fields; accepted: fewer"
                )
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == VARINT:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            if kind == BYTES:
                size, at = _varint(data, at)
            elif kind in (FIXED32, FIXED64):
                size = 4 if kind == FIXED32 else 8
            else:
                raise IndexError
            if at + size > len(data):
                raise IndexError
            yield tag >> 3, data[at : at + size]
            at += size
    except IndexError as error:
        raise CheckpointError(
            f"{where}: byte {at} of a message: found no valid field; accepted: a "
            "SentencePiece model"
        ) from error


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of 7 bits a byte and the place behind it; raises IndexError."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError


def _text(value: Any, where: str) -> str:
    try:
        return bytes.decode(value)
    except (TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{where}: piece: found {show(value)}; accepted: a text in UTF-8"
        ) from error


def _score(value: Any, where: str) -> float:
    if not isinstance(value, bytes) or len(value) != 4:
        raise CheckpointError(
            f"{where}: score: found {show(value)}; accepted: a float32"
        )
    return float(struct.unpack("<f", value)[0])
