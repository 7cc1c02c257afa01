"""Frames of the caller protocol, described in docs/callers.md.

Each frame is a prefix of 8 bytes, little-endian - :data:`MAGIC` (2), kind (2), length
of the payload (4) - and the payload::

    HELLO    both    uint32: version of the protocol
    OPEN     caller  JSON: model, config
    READY    inl     uint32: context; UTF-8: device
    REQUEST  caller  uint32: number; JSON: prompt or messages, options
    TOKENS   inl     uint32: number, N; int32 [N]: tokens; UTF-8: text
    DONE     inl     uint32: number, prompt tokens; UTF-8: finish reason
    CANCEL   caller  uint32: number
    ERROR    inl     uint32: number, 0 of the connection; UTF-8: class and message
    CLOSE    caller  empty
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, BinaryIO, NamedTuple

from inl.bounded_json import parse_object
from inl.errors import InvalidJson, ProtocolError

VERSION = 1
MAGIC = b"IC"
PREFIX = struct.Struct("<2sHI")
NUMBER = struct.Struct("<I")
PAIR = struct.Struct("<II")
MAX_BYTES = 1 << 26
"""Longest payload."""


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    OPEN = 2
    READY = 3
    REQUEST = 4
    TOKENS = 5
    DONE = 6
    CANCEL = 7
    ERROR = 8
    CLOSE = 9


KINDS = {kind.value: kind for kind in Kind}


class Frame(NamedTuple):
    """A received frame."""

    kind: Kind
    payload: bytes


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """Return a frame as it is sent."""
    return PREFIX.pack(MAGIC, kind, len(payload)) + payload


def read(source: BinaryIO) -> Frame | None:
    """Read a frame; ``None`` at the end of the stream.

    Raises :class:`~inl.errors.ProtocolError` for an invalid or incomplete frame.
    """
    head = source.read(PREFIX.size)
    if not head:
        return None
    if len(head) < PREFIX.size:
        raise ProtocolError(f"caller: found {len(head)} bytes of a frame, then the end")
    magic, number, length = PREFIX.unpack(head)
    if magic != MAGIC:
        raise ProtocolError(
            f"caller: found {head!r} at the start of a frame, accepted: {MAGIC!r} first"
        )
    if number not in KINDS:
        raise ProtocolError(
            f"caller: found frame kind {number}, accepted: 1 to {max(Kind)}"
        )
    if length > MAX_BYTES:
        raise ProtocolError(
            f"caller: found a payload of {length:,} bytes, accepted: {MAX_BYTES:,}"
        )
    payload = source.read(length)
    if len(payload) < length:
        raise ProtocolError(
            f"caller: found {len(payload)} of the {length} bytes of a "
            f"{KINDS[number].name}, then the end"
        )
    return Frame(KINDS[number], payload)


def tokens(number: int, ids: Sequence[int], text: str) -> bytes:
    """Encode generated tokens and the text that they complete."""
    packed = struct.pack(f"<{len(ids)}i", *ids)
    return PAIR.pack(number, len(ids)) + packed + text.encode()


def numbered(number: int, text: str) -> bytes:
    """Encode a number and a text: payload of READY and ERROR."""
    return NUMBER.pack(number) + text.encode("utf-8", "replace")


def read_number(payload: bytes, what: str) -> int:
    """Decode the number at the start of a payload."""
    if len(payload) < NUMBER.size:
        raise ProtocolError(f"caller: {what}: found {len(payload)} bytes, needs 4")
    number: int = NUMBER.unpack_from(payload)[0]
    return number


def read_object(payload: bytes, what: str) -> dict[str, Any]:
    """Decode a JSON object."""
    try:
        return parse_object(payload, f"caller: {what}")
    except InvalidJson as error:
        raise ProtocolError(str(error)) from None
