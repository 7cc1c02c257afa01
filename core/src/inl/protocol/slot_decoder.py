"""Strict decoder of frames that set one slot: admissions, releases, token biases."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import ProtocolError
from inl.protocol.runner import Limits
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    MAX_TOKEN_BIASES,
    TOKEN_BIAS_SIZE,
    TOKEN_BIAS_WORD,
    TokenBias,
    admit_size,
)
from inl.spec.step import PARAMS

if TYPE_CHECKING:
    from inl.spec.message import IntArray

SIGNED = ("presence_penalty", "frequency_penalty")
"""Sampling parameters that may be negative."""


class AdmitFrame(NamedTuple):
    """An admission."""

    slot: int
    length: int
    last: int
    adapter: int
    params: tuple[float, ...]
    """Values of :data:`~inl.spec.step.PARAMS`."""
    blocks: list[list[int]]
    """[G][B] block table, padded with 0."""


class TokenBiasFrame(NamedTuple):
    """Counts and biases of tokens of one slot."""

    slot: int
    biases: list[TokenBias]


def read_admission(frame: IntArray, limits: Limits) -> AdmitFrame:
    """Decode an admission or a release; raises :class:`~inl.errors.ProtocolError`."""
    size = admit_size(limits.groups, limits.max_blocks_per_seq)
    if len(frame) != size:
        raise ProtocolError(f"admission: found {len(frame)} words, expected {size}")
    words, at, width = frame.tolist(), ADMISSION_WORD, limits.max_blocks_per_seq
    slot, length, last, adapter = words[at.slot : at.params]
    params = _floats(words[at.params : at.blocks])
    blocks = [words[start : start + width] for start in range(at.blocks, size, width)]
    for name, value, accepted in (
        ("slot", slot, range(1, limits.slots)),
        ("length", length, range(width * limits.block_size + 1)),
        ("last token", last, range(limits.vocab)),
        ("adapter", adapter, range(limits.adapters + 1)),
    ):
        if value not in accepted:
            raise ProtocolError(
                f"admission to slot {slot}, {name}: found {value}, "
                f"accepts {accepted[0]} to {accepted[-1]}"
            )
    _check_params(slot, params)
    for group, ids in enumerate(blocks):
        if min(ids) < 0 or max(ids) >= limits.blocks[group]:
            raise ProtocolError(
                f"admission to slot {slot}, group {group}: found blocks {min(ids)} to "
                f"{max(ids)}, accepts 0 to {limits.blocks[group] - 1}"
            )
    return AdmitFrame(slot, length, last, adapter, params, blocks)


def _check_params(slot: int, params: Sequence[float]) -> None:
    for name, value in zip(PARAMS, params, strict=True):
        if not (math.isfinite(value) and (name in SIGNED or value >= 0)):
            accepted = "finite numbers" if name in SIGNED else "0 and more"
            raise ProtocolError(
                f"admission to slot {slot}, {name}: found {value}, accepts {accepted}"
            )


def read_token_biases(frame: IntArray, limits: Limits) -> TokenBiasFrame:
    """Decode a token bias frame; raises :class:`~inl.errors.ProtocolError`."""
    if len(frame) != TOKEN_BIAS_SIZE:
        raise ProtocolError(
            f"token biases: found {len(frame)} words, expected {TOKEN_BIAS_SIZE}"
        )
    words, at = frame.tolist(), TOKEN_BIAS_WORD
    slot, used = words[at.slot], words[at.used]
    where = f"token biases of slot {slot}"
    if not limits.penalty_vocab:
        raise ProtocolError(
            f"{where}: need a runner with sampler sample_filtered, "
            f"found {limits.sampler}"
        )
    if not (0 < slot < limits.slots and 0 <= used <= MAX_TOKEN_BIASES):
        raise ProtocolError(
            f"{where}: found {used} entries, accepts up to {MAX_TOKEN_BIASES} for "
            f"slots 1 to {limits.slots - 1}"
        )
    stop = at.entries + BIAS_WORDS * used
    if any(words[stop:]):
        raise ProtocolError(f"{where}, padding: found a nonzero word, accepts 0")
    biases = _token_biases(words[at.entries : stop])
    _check_token_biases(where, biases, limits)
    return TokenBiasFrame(slot, biases)


def _token_biases(words: Sequence[int]) -> list[TokenBias]:
    tokens = words[BIAS_WORD.token :: BIAS_WORDS]
    counts = words[BIAS_WORD.token_count :: BIAS_WORDS]
    biases = _floats(words[BIAS_WORD.bias :: BIAS_WORDS])
    return [TokenBias(*each) for each in zip(tokens, counts, biases, strict=True)]


def _check_token_biases(
    where: str, biases: Sequence[TokenBias], limits: Limits
) -> None:
    for token, token_count, bias in biases:
        if not (0 <= token < limits.vocab and token_count >= 0 and math.isfinite(bias)):
            raise ProtocolError(
                f"{where}: found {(token, token_count, bias)}, accepts tokens up to "
                f"{limits.vocab - 1}, counts from 0 and finite biases"
            )
    if len({each.token for each in biases}) < len(biases):
        raise ProtocolError(f"{where}: found a token twice, accepts each once")


def _floats(words: Sequence[int]) -> tuple[float, ...]:
    count = len(words)
    return struct.unpack(f"<{count}f", struct.pack(f"<{count}i", *words))
