"""Prefix-cache keys: a chain of hashes over a sequence's full blocks.

Two blocks have the same key only if they hold the same tokens after the same tokens,
with the same model, adapter and cache salt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inl.scheduling.embedded_positions import EmbeddedPositions


def root_hash(
    *, model_digest: str, adapter_digest: str, cache_salt: str, block_size: int
) -> bytes:
    """Return the parent key of a sequence's first block.

    cache_salt: separates tenants; without it, one tenant could learn from response
    times what another has sent.
    """
    fields = {
        b"model": model_digest.encode(),
        b"adapter": adapter_digest.encode(),
        b"salt": cache_salt.encode(),
        b"block": struct.pack("<q", block_size),
    }
    # Length prefixes keep the end of one field from being read as the next one.
    return sha256(b"".join(map(_tagged, fields, fields.values()))).digest()


def _tagged(tag: bytes, value: bytes) -> bytes:
    return struct.pack("<BQ", len(tag), len(value)) + tag + value


def block_hash(parent: bytes, token_ids: Sequence[int], embedded: bytes = b"") -> bytes:
    """Return the key of the block with ``token_ids`` that follows block ``parent``.

    embedded: digest of embeddings in place of some of its tokens.
    """
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return sha256(parent + packed + embedded).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    count: int,
    embeddings: EmbeddedPositions | None = None,
) -> None:
    """Extend ``hashes``, a root and one key per block, to ``count`` blocks in place."""
    for index in range(len(hashes) - 1, count):
        start, stop = index * block_size, (index + 1) * block_size
        embedded = embeddings.digest(start, stop) if embeddings else b""
        hashes.append(block_hash(hashes[-1], token_ids[start:stop], embedded))
