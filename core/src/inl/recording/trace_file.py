"""Trace files of the flight recorder: a magic number, then records.

Each record is a kind (1 byte), 3 bytes of padding, the payload's length (4 bytes,
little-endian) and the payload::

    RUN     JSON: runner and limits; the first record, and again wherever another
            runner took over
    FRAME   int32: a submitted frame of inl.spec.message
    MASKS   int32: step, N, words per mask, rows [N], masks [N, words]; follows the
            frame of a step with the MASKED flag; rows without a mask are left out
    REPLY   int32: payload of a REPLY of inl.protocol.wire
    ADAPTER payload of an ADAPTER of inl.protocol.wire: loaded for the frames after it
    WRITE   payload of a WRITE of inl.protocol.wire: a WRITE frame and its contents
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inl.errors import ProtocolError
from inl.protocol import wire_arrays, wire_json
from inl.protocol.runner import AdapterSource, BlockWrites, CacheWrite, Limits, Reply
from inl.protocol.token_masks import TokenMasks
from inl.protocol.wire_fields import sent
from inl.spec.message import header

MAGIC = b"INLTRACE\x02\x00\x00\x00"
"""Name and version (2) of the format."""

RECORD = struct.Struct("<B3xI")
RUN, FRAME, REPLY, MASKS, ADAPTER, WRITE = range(1, 7)


class RunHeader(NamedTuple):
    """The recorded runner and model."""

    limits: Limits
    device: str = ""
    dtype: str = ""
    model: str = ""
    """Path of the model's files; "" for a runner without a model."""
    digest: str = ""
    """See :func:`inl.checkpoints.digest.model_digest`."""


Item = RunHeader | Reply | TokenMasks | AdapterSource | CacheWrite | Any
"""A record, as it is read; frames are int32 arrays [words]."""


def pack(item: Item | BlockWrites) -> bytes:
    """Encode a record."""
    if isinstance(item, RunHeader):
        fields = item._asdict() | {"limits": sent(item.limits)}
        payload: bytes | memoryview = wire_json.text(fields)
        kind = RUN
    elif isinstance(item, Reply):
        payload, kind = wire_arrays.reply(item), REPLY
    elif isinstance(item, TokenMasks):
        payload, kind = _pack_masks(item), MASKS
    elif isinstance(item, AdapterSource):
        payload, kind = wire_json.adapter(item), ADAPTER
    elif isinstance(item, BlockWrites):
        return pack(item.joined())
    elif isinstance(item, CacheWrite):
        payload, kind = wire_arrays.write(*item), WRITE
    else:
        payload, kind = wire_arrays.words(item), FRAME
    return RECORD.pack(kind, len(payload)) + payload


def read_trace(path: str | Path) -> list[Item]:
    """Read the records of a file; the first is a :class:`RunHeader`.

    Raises :class:`~inl.errors.ProtocolError` with the byte offset of a bad record.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProtocolError(f"trace {path}: cannot be read: {reason}") from error
    if data[: len(MAGIC)] != MAGIC:
        raise ProtocolError(
            f"trace {path}: found {data[: len(MAGIC)]!r} at the start, accepts "
            f"{MAGIC!r}: a file of `inl trace` of this version"
        )
    records = list(_records(data, str(path)))
    if not records or not isinstance(records[0], RunHeader):
        raise ProtocolError(f"trace {path}: the first record is not a run header")
    return records


def _records(data: bytes, path: str) -> Iterator[Item]:
    at = len(MAGIC)
    while at < len(data):
        where = f"trace {path}, byte {at}"
        start = at + RECORD.size
        kind, length = RECORD.unpack(data[at:start].ljust(RECORD.size, b"\0"))
        at = start + length
        if start > len(data) or at > len(data):
            raise ProtocolError(
                f"{where}: the last record is cut off: {len(data)} bytes in the file, "
                f"{at} needed; record again, and let the engine close"
            )
        yield _record(kind, data[start:at], where)


def _record(kind: int, payload: bytes, where: str) -> Item:
    try:
        if kind == RUN:
            return _run(payload)
        if kind == FRAME:
            frame = wire_arrays.ints(payload, "frame")
            header(frame)
            return frame
        if kind == REPLY:
            return wire_arrays.read_reply(payload)
        if kind == MASKS:
            return _read_masks(payload)
        if kind == ADAPTER:
            return wire_json.read_adapter_source(payload, "adapter")
        if kind == WRITE:
            return CacheWrite(*wire_arrays.read_write(payload))
    except ProtocolError as error:
        raise ProtocolError(f"{where}: {error}") from None
    raise ProtocolError(f"{where}: found a record of kind {kind}, accepts 1 to 6")


def _run(payload: bytes) -> RunHeader:
    fields = wire_json.read_text(payload, "run")
    limits = wire_json.read_limits(fields.get("limits"), "run")
    rest = {name: fields.get(name) for name in RunHeader._fields[1:]}
    for name, value in rest.items():
        if not isinstance(value, str):
            raise ProtocolError(f"{name}: found {value!r:.60}, accepts a string")
    return RunHeader(limits, **rest)  # type: ignore[arg-type]


def _pack_masks(masks: TokenMasks) -> memoryview:
    head = [masks.step, len(masks.rows), len(masks.words[0]), *masks.rows]
    return wire_arrays.words(np.concatenate([np.array(head, np.int32), *masks.words]))


def _read_masks(payload: bytes) -> TokenMasks:
    words = wire_arrays.ints(payload, "masks")
    step, count, width = words[:3].tolist() if len(words) >= 3 else (0, 0, 0)
    if count < 1 or width < 1 or len(words) != 3 + count * (1 + width):
        raise ProtocolError(
            f"masks of step {step}: found {len(words)} words for {count} masks of "
            f"{width} words"
        )
    rows = tuple(words[3 : 3 + count].tolist())
    return TokenMasks(step, rows, tuple(words[3 + count :].reshape(count, width)))
