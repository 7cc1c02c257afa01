"""Names of full blocks: a hash chain over the ids that lead up to each of them.

Two blocks have the same key only if the same tokens stand before and in them, under
the same model weights, adapter and tenant.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256


def root(*, model: str, adapter: int, salt: str, block_size: int) -> bytes:
    """Return the key before the first block.

    ``model`` is a digest of the model and its weights, ``salt`` a secret of the tenant:
    without it, one tenant could learn from timing what another has asked.
    """
    fields = {
        b"model": model.encode(),
        b"adapter": struct.pack("<q", adapter),
        b"salt": salt.encode(),
        b"block": struct.pack("<q", block_size),
    }
    # Lengths keep a field's end from being read as the next one's beginning.
    return sha256(b"".join(map(_tagged, fields, fields.values()))).digest()


def _tagged(tag: bytes, value: bytes) -> bytes:
    return struct.pack("<BQ", len(tag), len(value)) + tag + value


def follow(parent: bytes, ids: Sequence[int]) -> bytes:
    """Return the key of the block that holds ``ids`` after the block ``parent``."""
    return sha256(parent + struct.pack(f"<{len(ids)}i", *ids)).digest()


def extend(keys: list[bytes], ids: Sequence[int], size: int, count: int) -> None:
    """Grow ``keys``, a root and then one key a block, to the first ``count`` blocks."""
    for index in range(len(keys) - 1, count):
        keys.append(follow(keys[-1], ids[index * size : (index + 1) * size]))
