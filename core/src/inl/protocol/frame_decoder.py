"""Frames read word by word and checked against a runner's limits, on plain ints.

Compiled runners read a frame on their device without looking at its sense. This is the
suspicious reader, for :mod:`inl.testing.hash_runner` and for tests.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import ProtocolError
from inl.protocol.runner import Limits
from inl.spec.message import (
    HEADER,
    MAX_TOKEN_BIASES,
    TOKEN_BIAS_SIZE,
    BlockTableUpdate,
    Header,
    TokenBias,
    admit_size,
    layout,
)
from inl.spec.step import PARAMS

if TYPE_CHECKING:
    from inl.spec.message import IntArray

ONE = 0x3F800000
"""Bits of 1.0 in float32; every float in [0, 1) has smaller ones."""


class StepRow(NamedTuple):
    """One sequence's part of a step."""

    slot: int
    tokens: list[int]
    uniform: int
    """Float32 bits."""


class StepFrame(NamedTuple):
    """A step, without its padding."""

    header: Header
    rows: list[StepRow]
    cells: list[BlockTableUpdate]


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
    """Marks of a slot."""

    slot: int
    marks: list[TokenBias]


def read_step(frame: IntArray, found: Header, limits: Limits) -> StepFrame:
    """Read a step of width 1; raises :class:`~inl.errors.ProtocolError`.

    Checks all that needs no memory of earlier frames: sizes against the bucket and the
    limits, ids, slots, blocks, uniforms, the order of rows, and that padding is 0.
    """
    bucket = found.bucket
    if bucket.tokens_per_row != 1:
        _refuse(found, "width", bucket.tokens_per_row, "1")
    if limits.buckets and bucket not in limits.buckets:
        _refuse(
            found, "bucket", tuple(bucket), f"one of {len(limits.buckets)} programs"
        )
    place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
    if len(frame) != place.size:
        _refuse(found, "words", len(frame), str(place.size))
    if found.used_updates > (place.tokens - place.updates) // 4:
        _refuse(
            found, "cells", found.used_updates, f"{(place.tokens - place.updates) // 4}"
        )
    words = frame.tolist()
    rows = words[place.rows : place.updates]
    cells = words[place.updates : place.tokens]
    tokens = words[place.tokens :]
    for name, part, used in (
        ("header", words[len(Header._fields) : HEADER], 0),
        ("rows", rows, 3 * found.used_rows),
        ("cells", cells, 4 * found.used_updates),
        ("tokens", tokens, found.used_tokens),
    ):
        if any(part[used:]):
            _refuse(found, f"padding of {name}", "a word that is set", "0")
    return StepFrame(
        found, _rows(found, rows, tokens, limits), _cells(found, cells, limits)
    )


def _rows(
    found: Header, words: Sequence[int], tokens: Sequence[int], limits: Limits
) -> list[StepRow]:
    rows: list[StepRow] = []
    at = 0
    for index in range(found.used_rows):
        slot, count, uniform = words[3 * index : 3 * index + 3]
        where = f"row {index}"
        if not 0 < slot < limits.slots:
            _refuse(found, f"{where}, slot", slot, f"1 to {limits.slots - 1}")
        if count < 1 or (count > 1 and index < found.decode_rows):
            _refuse(found, f"{where}, tokens", count, "1, or more after decoding rows")
        if not 0 <= uniform < ONE:
            _refuse(found, f"{where}, bits of a uniform", uniform, "[0, 1)")
        ids = list(tokens[at : at + count])
        at += count
        # Only the first can be the slot's last token: later ones are not chosen yet.
        if ids and not (ids[0] >= -1 and (count == 1 or min(ids[1:]) >= 0)):
            _refuse(found, f"{where}, least token", min(ids), "ids, or -1 as the first")
        if ids and max(ids) >= limits.vocab:
            _refuse(found, f"{where}, token", max(ids), f"up to {limits.vocab - 1}")
        rows.append(StepRow(slot, ids, uniform))
    if not rows or at != found.used_tokens:
        _refuse(found, "tokens of all rows", at, f"{found.used_tokens}, over 1 row")
    if found.decode_rows > len(rows):
        _refuse(found, "decoding rows", found.decode_rows, f"up to {len(rows)}")
    if len({row.slot for row in rows}) < len(rows):
        _refuse(found, "slots", [row.slot for row in rows], "each slot once")
    return rows


def _cells(
    found: Header, words: Sequence[int], limits: Limits
) -> list[BlockTableUpdate]:
    cells = [
        BlockTableUpdate(*words[4 * index : 4 * index + 4])
        for index in range(found.used_updates)
    ]
    for cell in cells:
        group, slot, index, block = cell
        if not (
            0 <= group < limits.groups
            and 0 < slot < limits.slots
            and 0 <= index < limits.max_blocks_per_seq
            and _may_hold(block, group, limits)
        ):
            _refuse(
                found, "cell", tuple(cell), f"group, slot, index, block of {limits}"
            )
    return cells


def _may_hold(block: int, group: int, limits: Limits) -> bool:
    """Whether a table cell may have this value: 0 only where a window has passed."""
    windowed = bool(limits.windows) and limits.windows[group] is not None
    return (0 if windowed else 1) <= block < limits.blocks[group]


def read_admission(frame: IntArray, limits: Limits) -> AdmitFrame:
    """Read an admission or a release; raises :class:`~inl.errors.ProtocolError`."""
    size = admit_size(limits.groups, limits.max_blocks_per_seq)
    if len(frame) != size:
        raise ProtocolError(f"admission: found {len(frame)} words, expected {size}")
    words = frame.tolist()
    slot, length, last, adapter = words[HEADER : HEADER + 4]
    start = HEADER + 4 + len(PARAMS)
    params = _floats(words[HEADER + 4 : start])
    width = limits.max_blocks_per_seq
    blocks = [words[at : at + width] for at in range(start, size, width)]
    capacity = width * limits.block_size
    for name, value, accepted in (
        ("slot", slot, range(1, limits.slots)),
        ("length", length, range(capacity + 1)),
        ("last token", last, range(limits.vocab)),
        ("adapter", adapter, range(2**31)),
    ):
        if value not in accepted:
            raise ProtocolError(
                f"admission to slot {slot}, {name}: found {value}, "
                f"accepts {accepted.start} to {accepted.stop - 1}"
            )
    for name, number in zip(PARAMS, params, strict=True):
        signed = name in ("presence_penalty", "frequency_penalty")
        if not (math.isfinite(number) and (signed or number >= 0)):
            raise ProtocolError(
                f"admission to slot {slot}, {name}: found {number}, accepts "
                f"{'finite numbers' if signed else '0 up'}"
            )
    for group, ids in enumerate(blocks):
        if min(ids) < 0 or max(ids) >= limits.blocks[group]:
            raise ProtocolError(
                f"admission to slot {slot}, group {group}: found blocks {min(ids)} to "
                f"{max(ids)}, accepts 0 to {limits.blocks[group] - 1}"
            )
    return AdmitFrame(slot, length, last, adapter, params, blocks)


def read_token_biases(frame: IntArray, limits: Limits) -> TokenBiasFrame:
    """Read a frame of marks; raises :class:`~inl.errors.ProtocolError`."""
    if len(frame) != TOKEN_BIAS_SIZE:
        raise ProtocolError(
            f"marks: found {len(frame)} words, expected {TOKEN_BIAS_SIZE}"
        )
    words = frame.tolist()
    slot, used = words[HEADER : HEADER + 2]
    where = f"marks of slot {slot}"
    if not limits.penalty_vocab:
        raise ProtocolError(f"{where}: this runner serves {limits.sampler} at most")
    if not (0 < slot < limits.slots and 0 <= used <= MAX_TOKEN_BIASES):
        raise ProtocolError(
            f"{where}: found {used} marks, accepts up to {MAX_TOKEN_BIASES} of slots 1 to "
            f"{limits.slots - 1}"
        )
    body = words[HEADER + 2 :]
    if any(body[3 * used :]):
        raise ProtocolError(f"{where}, padding: found a word that is set, accepts 0")
    biases = _floats(body[2 : 3 * used : 3])
    pairs = zip(body[0 : 3 * used : 3], body[1 : 3 * used : 3], biases, strict=True)
    marks = [TokenBias(*values) for values in pairs]
    for mark in marks:
        if not (
            0 <= mark.token < limits.vocab
            and mark.token_count >= 0
            and math.isfinite(mark.bias)
        ):
            raise ProtocolError(
                f"{where}: found {tuple(mark)}, accepts tokens up to "
                f"{limits.vocab - 1}, counts from 0 and finite biases"
            )
    if len({mark.token for mark in marks}) < used:
        raise ProtocolError(f"{where}: found a token twice, accepts each once")
    return TokenBiasFrame(slot, marks)


def _floats(words: Sequence[int]) -> tuple[float, ...]:
    count = len(words)
    return struct.unpack(f"<{count}f", struct.pack(f"<{count}i", *words))


def _refuse(found: Header, what: str, value: object, accepted: str) -> None:
    raise ProtocolError(f"step {found.step}, {what}: found {value}, accepts {accepted}")
