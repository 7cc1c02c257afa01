"""Files of blocks: a signature, what the block is, and its contents.

A record is accepted only if its signature is that of the folder's key, and all that it
says of itself is what is looked for: model, dtype, layout, cache group, prefix-cache
key, generation of the folder.
"""

from __future__ import annotations

import hmac
import json
import struct
from typing import NamedTuple

from inl.bounded_json import parse_object
from inl.cache_dir.private_folder import signature
from inl.errors import InvalidJson, ProtocolError
from inl.protocol.wire_arrays import contents, read_contents
from inl.spec.cache_layout import BlockLayout, Parts

LENGTH = struct.Struct("<I")
SIGNATURE = 32
FORMAT = "inl kv 1"


class Identity(NamedTuple):
    """What contents depend on besides the block's own key."""

    model: str
    """Digest of the model and of all settings that change keys and values."""
    dtype: str
    """Compute dtype."""
    layouts: tuple[BlockLayout, ...]
    """Of each cache group."""


class BadRecord(Exception):
    """A record cannot be used; ``kind`` is "damaged", "foreign" or "stale"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def head(identity: Identity, group: int, key: bytes, generation: int) -> bytes:
    """Return what the record of a block says of itself."""
    fields = {
        "format": FORMAT, "model": identity.model, "dtype": identity.dtype,
        "layout": repr(tuple(identity.layouts[group])), "group": group,
        "key": key.hex(), "generation": generation,
    }  # fmt: skip
    return json.dumps(fields, sort_keys=True).encode()


def encoded(secret: bytes, own: bytes, parts: Parts) -> list[bytes]:
    """Return the pieces of a record. own: its :func:`head`."""
    payload = contents(parts)
    sealed = signature(secret, b"block", own, payload)
    return [sealed, LENGTH.pack(len(own)), own, payload]


def decoded(secret: bytes, own: bytes, data: bytes) -> Parts:
    """Return the contents of a record.

    own: the :func:`head` that it must have. Raises :class:`BadRecord`.
    """
    start = SIGNATURE + LENGTH.size
    if len(data) < start:
        raise BadRecord("damaged", f"found {len(data)} bytes")
    stop = start + LENGTH.unpack_from(data, SIGNATURE)[0]
    said, payload = data[start:stop], data[stop:]
    if not hmac.compare_digest(
        data[:SIGNATURE], signature(secret, b"block", said, payload)
    ):
        raise BadRecord("damaged", "the signature is wrong")
    if said != own:
        raise BadRecord(*_difference(said, own))
    try:
        return read_contents(payload)
    except ProtocolError as error:
        raise BadRecord("damaged", str(error)) from None


def _difference(said: bytes, own: bytes) -> tuple[str, str]:
    """Return the kind of a record that describes another block, and the reason."""
    try:
        found, expected = (parse_object(each, "record") for each in (said, own))
    except InvalidJson as error:
        return "foreign", str(error)
    names = sorted(name for name in expected if found.get(name) != expected[name])
    kind = "stale" if names == ["generation"] else "foreign"
    return kind, f"another {', '.join(names) or 'description'}"
