"""Files of ``/v1/files`` in one folder, whose bytes are bounded together."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from inl.bounded_json import check_json
from inl.errors import InvalidJson, RequestError
from inl.file_lock import locked
from inl.serve.api_error import ApiError

log = logging.getLogger("inl.serve")

MAX_FILES = 10_000
"""Files that are stored at a time."""

SALT = "salt"
"""File of the random bytes with which keys are hashed."""

R = TypeVar("R", bound=msgspec.Struct)


class StoredFile(msgspec.Struct):
    """What is known of a file. owner: hash of the key that may read it."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class FileStore:
    """The files of a folder, which one server has at a time.

    Used by the event loop only, but :meth:`open` and :meth:`write`. Raises
    :class:`~inl.errors.RequestError` for a folder that cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._closing = ExitStack()
        self.extra_bytes = 0
        """Bytes of answers that are no file yet."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._closing.enter_context(locked(folder / "lock", wait=False))
            self._salt = self._read_salt()
        except BlockingIOError as error:
            raise RequestError(
                f"--files {folder}: another server uses it; name another folder"
            ) from error
        except OSError as error:
            raise RequestError(f"--files {folder}: {error.strerror}") from error
        self._files = {each.id: each for each in self.records("file", StoredFile)}

    def _read_salt(self) -> bytes:
        path = self.folder / SALT
        if not path.exists():
            self._write(path, secrets.token_bytes(16))
        return path.read_bytes()

    def close(self) -> None:
        """Let another server use the folder. Closing twice is allowed."""
        self._closing.close()

    def owner_of(self, key: str | None) -> str:
        """Return the name under which files of a key are stored; "" without one."""
        if key is None:
            return ""
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=16).hexdigest()

    def records(self, kind: str, schema: type[R]) -> list[R]:
        """Return the records of a kind, by id; one that cannot be read is left out."""
        found = []
        for path in sorted(self.folder.glob(f"{kind}*.json")):
            try:
                text = path.read_bytes()
                check_json(text, path.name)
                found.append(msgspec.json.decode(text, type=schema))
            except (OSError, InvalidJson, msgspec.MsgspecError) as error:
                log.warning("%s: left out: %s", path, error)
        return found

    def save(self, name: str, record: msgspec.Struct) -> None:
        """Write a record at once, or not at all."""
        self._write(self.folder / f"{name}.json", msgspec.json.encode(record))

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        part = path.with_name(path.name + ".new")
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=_private) as file:
            file.write(data)
        part.replace(path)

    def path(self, name: str) -> Path:
        """Return where the content of a file is."""
        return self.folder / f"{name}.data"

    def open(self, name: str) -> BinaryIO:
        """Open the content of a file, which stays readable if it is deleted."""
        return self.path(name).open("rb")

    def write(self, name: str, data: bytes) -> None:
        """Write the content of a file."""
        self._write(self.path(name), data)

    @property
    def free_bytes(self) -> int:
        """How many bytes more may be stored."""
        used = sum(each.bytes for each in self._files.values())
        return self._max_bytes - used - self.extra_bytes

    def add(
        self, owner: str, filename: str, purpose: str, size: int, seconds: int | None
    ) -> StoredFile:
        """Return the record of a new file, whose content is to be written.

        seconds: until it is deleted. Raises :class:`ApiError` 400 without room.
        """
        self.expire()
        if size > self.free_bytes or len(self._files) >= MAX_FILES:
            raise ApiError(
                400,
                f"file: found {size} bytes, accepts {max(self.free_bytes, 0)}: the "
                f"files of this server may have {self._max_bytes} bytes together "
                f"(--max-file-bytes), and number {MAX_FILES}; delete some",
                param="file",
                code="storage_full",
            )
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        name = f"file-{secrets.token_hex(12)}"
        file = StoredFile(name, owner, filename, purpose, size, now, expires)
        self._files[name] = file
        return file

    def find(self, owner: str, name: str) -> StoredFile:
        """Return a file of an owner; raises :class:`ApiError` 404."""
        self.expire()
        file = self._files.get(name)
        if file is None or file.owner != owner:
            raise ApiError(404, f"file: found no file {name!r:.60}", param="file_id")
        return file

    def of(self, owner: str) -> Sequence[StoredFile]:
        """Return the files of an owner, the newest first."""
        self.expire()
        files = [each for each in self._files.values() if each.owner == owner]
        return sorted(files, key=lambda each: (each.created_at, each.id), reverse=True)

    def delete(self, file: StoredFile) -> None:
        """Delete a file."""
        del self._files[file.id]
        for path in (self.folder / f"{file.id}.json", self.path(file.id)):
            path.unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete the files whose time has ended."""
        now = time.time()
        for file in [*self._files.values()]:
            if file.expires_at is not None and file.expires_at <= now:
                self.delete(file)


def _private(path: str, flags: int) -> int:
    """Open a file that other users can neither read nor change."""
    return os.open(path, flags, 0o600)
