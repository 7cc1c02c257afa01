"""Digests of files' contents, remembered until a file changes."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import local
from typing import Final

from inl.backend.weight_cache import FileIdentity
from inl.bounded_json import parse_json
from inl.cache_dir.private_folder import PrivateFolder, Untrusted, signature

PIECE: Final = 8 << 20
"""Bytes of a piece, which one thread hashes."""
READ: Final = 1 << 20
"""Bytes read at a time."""
THREADS: Final = 8
"""More threads read no faster than the disk."""
TICK_NS: Final = 2_000_000_000
"""A file may change again in this time and keep its timestamps: the coarsest clock of
a file system."""
NAME: Final = "digests"
MAX_FILES: Final = 256
"""Files whose digests are remembered, the most recently hashed."""
MAX_BYTES: Final = 1 << 20


class ChangedFile(OSError):
    """A file is not the one that was opened before, or changed while it was read."""


class RememberedDigests:
    """Digests of files, remembered in a private folder by the files' identities.

    threads: that hash new files; with 1 the calling thread does, also while the
    interpreter ends. A damaged record counts as empty. Raises OSError.
    """

    def __init__(self, folder: PrivateFolder, *, threads: int = THREADS) -> None:
        self._folder, self._key, self._threads = folder, folder.key(), threads
        self._known = self._read()

    def digest(self, path: Path, opened: FileIdentity | None = None) -> str:
        """Return the digest of a file's contents, as :func:`content_digest` does.

        opened: raises :class:`ChangedFile` if the file has another identity now.
        """
        start = time.time_ns()
        with path.open("rb", buffering=0) as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            if opened not in (None, identity):
                raise ChangedFile(f"{path}: changed after it was opened")
            known = self._known.get(identity)
            if known is not None:
                return known
            digest = content_digest(file.fileno(), identity.size, self._threads)
            if FileIdentity.of(os.fstat(file.fileno())) != identity:
                raise ChangedFile(f"{path}: changed while it was read")
        if max(identity.mtime_ns, identity.ctime_ns) + TICK_NS < start:
            self._known[identity] = digest
            with suppress(OSError):  # then it is hashed again
                self._write()
        return digest

    def _read(self) -> dict[FileIdentity, str]:
        try:
            data = self._folder.read(NAME, MAX_BYTES)
        except (Untrusted, OSError):
            return {}
        sealed, text = data[:32], data[32:]
        if not hmac.compare_digest(sealed, signature(self._key, b"digests", text)):
            return {}
        known = parse_json(text, str(self._folder.path / NAME))
        return {FileIdentity(*identity): digest for *identity, digest in known}

    def _write(self) -> None:
        recent = list(self._known.items())[-MAX_FILES:]
        text = json.dumps([[*identity, digest] for identity, digest in recent]).encode()
        self._folder.write(NAME, [signature(self._key, b"digests", text), text])


def content_digest(descriptor: int, size: int, threads: int = THREADS) -> str:
    """Return the SHA-256 of the SHA-256 digests of all pieces of an open file, in hex.

    Pieces are hashed in up to ``threads`` threads. Raises :class:`ChangedFile` if the
    file has fewer than ``size`` bytes.
    """
    buffers = local()

    def piece(start: int) -> bytes:
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(READ))
        digest, end = hashlib.sha256(), min(start + PIECE, size)
        while start < end:
            count = os.preadv(descriptor, [buffers.view[: end - start]], start)
            if not count:
                raise ChangedFile(f"found {start} bytes instead of {size}")
            digest.update(buffers.view[:count])
            start += count
        return digest.digest()

    starts = range(0, size, PIECE)
    if threads == 1:
        pieces = b"".join(map(piece, starts))
    else:
        with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
            pieces = b"".join(pool.map(piece, starts))
    return hashlib.sha256(pieces + size.to_bytes(8, "little")).hexdigest()
