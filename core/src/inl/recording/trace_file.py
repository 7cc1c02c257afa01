"""The file of the flight recorder: a magic, then records.

Each record is a kind (1 byte), 3 bytes of padding, the payload's length (4 bytes,
little-endian) and the payload::

    RUN     JSON: what runs, with its limits; the first record, and again wherever a
            fresh runner took over
    FRAME   int32: a frame of inl.spec.message that was submitted
    REPLY   int32: step, R, W, tokens [R, W], accepted [R]; after a "sample_filtered" step also N,
            float32 bits [R * W], ids [R * W, N], float32 bits [R * W, N]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import ProtocolError
from inl.protocol import wire_values
from inl.protocol.runner import Limits, Reply
from inl.spec.message import header

if TYPE_CHECKING:
    from inl.spec.message import IntArray
    from inl.weights.checkpoint import Checkpoint

MAGIC = b"INLTRACE\x01\x00\x00\x00"
"""Name and version; other bytes, other versions."""

RECORD = struct.Struct("<B3xI")
RUN, FRAME, REPLY = 1, 2, 3


class RunHeader(NamedTuple):
    """What was recorded."""

    limits: Limits
    device: str = ""
    dtype: str = ""
    model: str = ""
    """Path of the model's files; "" where no model computes."""
    digest: str = ""
    """See :func:`digest`."""


Item = RunHeader | Reply | Any
"""A record; anything else than the named ones is a frame, int32 [words]."""


def pack(item: Item) -> bytes:
    """Write a record."""
    if isinstance(item, RunHeader):
        fields = item._asdict() | {"limits": asdict(item.limits)}
        payload: bytes | memoryview = wire_values.text(fields)
        kind = RUN
    elif isinstance(item, Reply):
        payload, kind = wire_values.reply(item), REPLY
    else:
        payload, kind = wire_values.words(item), FRAME
    return RECORD.pack(kind, len(payload)) + payload


def read_trace(path: str | Path) -> list[RunHeader | Reply | IntArray]:
    """Read a file's records; the first is a :class:`RunHeader`.

    Raises :class:`~inl.errors.ProtocolError` with the place of what is wrong.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProtocolError(f"trace {path}: cannot be read: {reason}") from error
    if data[: len(MAGIC)] != MAGIC:
        raise ProtocolError(
            f"trace {path}: begins with {data[: len(MAGIC)]!r}, accepts {MAGIC!r}: "
            "a file of `inl trace` of this version"
        )
    found = list(_records(data, str(path)))
    if not found or not isinstance(found[0], RunHeader):
        raise ProtocolError(f"trace {path}: does not begin with what was recorded")
    return found


def _records(data: bytes, path: str) -> Iterator[RunHeader | Reply | IntArray]:
    at = len(MAGIC)
    while at < len(data):
        where = f"trace {path}, byte {at}"
        begin = at + RECORD.size
        kind, length = RECORD.unpack(data[at:begin].ljust(RECORD.size, b"\0"))
        at = begin + length
        if begin > len(data) or at > len(data):
            raise ProtocolError(
                f"{where}: the last record is cut off: {len(data)} bytes in the file, "
                f"{at} needed; record again, and let the engine close"
            )
        yield _record(kind, data[begin:at], where)


def _record(kind: int, payload: bytes, where: str) -> RunHeader | Reply | IntArray:
    try:
        if kind == RUN:
            return _run(payload)
        if kind == FRAME:
            frame = wire_values.ints(payload, "frame")
            header(frame)
            return frame
        if kind == REPLY:
            return wire_values.read_reply(payload)
    except ProtocolError as error:
        raise ProtocolError(f"{where}: {error}") from None
    raise ProtocolError(f"{where}: found a record of kind {kind}, accepts 1, 2 and 3")


def _run(payload: bytes) -> RunHeader:
    fields = wire_values.read_text(payload, "run")
    limits = wire_values.read_limits(fields.get("limits"), "run")
    rest = {name: fields.get(name) for name in RunHeader._fields[1:]}
    for name, value in rest.items():
        if not isinstance(value, str):
            raise ProtocolError(f"{name}: found {value!r:.60}, accepts text")
    return RunHeader(limits, **rest)  # type: ignore[arg-type]


def digest(checkpoint: Checkpoint) -> str:
    """Tell models apart without reading them: sha256 in hex.

    Over config, names, dtypes and shapes, and the bytes of all vectors, the norms,
    which are small and differ between any two trainings.
    """
    found = sha256(repr(_sorted(checkpoint.config)).encode())
    for name in sorted(checkpoint.names()):
        dtype, shape = checkpoint.spec(name)
        found.update(f"{name} {dtype} {shape}\n".encode())
        if len(shape) == 1:
            found.update(checkpoint.tensor(name).data.tobytes())
    return found.hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return value
