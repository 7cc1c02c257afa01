"""Files of ``/v1/files`` in one folder, whose bytes and number are bounded."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
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

CONTENT = re.compile(r"file-[0-9a-f]{24}\.data")

PARTIAL = re.compile(
    r"(file-[0-9a-f]{24}\.(data|json)|batch_[0-9a-f]{24}(\.json|_output|_error)|salt)\.new"
)
"""Names of files that are renamed once they are whole; others are none of ours."""

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

    Used by the event loop only, but :meth:`open` and :meth:`write`. max_bytes: of all
    files together. keys: that share the folder: none has more than its part of the
    number of files. max_key_bytes: of the files of one key; ``None`` is an equal part
    of all. Raises :class:`~inl.errors.RequestError` for a folder that cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        keys: int = 1,
        max_key_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.keys = keys
        self._max_bytes = max_bytes
        self._max_key_bytes = (
            max_bytes // keys if max_key_bytes is None else max_key_bytes
        )
        self._max_key_files = max(MAX_FILES // keys, 1)
        self._closing = ExitStack()
        self._bytes, self._count = Counter[str](), Counter[str]()
        """What each owner has, with what is being written."""
        self._files: dict[str, dict[str, StoredFile]] = defaultdict(dict)
        """The files of each owner that are whole, the oldest first."""
        self._next_expiry = inf
        self.is_used: Callable[[StoredFile], bool] = lambda _: False
        """Whether a file is needed, so that it does not expire."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._closing.enter_context(locked(folder / "lock", wait=False))
            self._salt = self._read_salt()
            self._drop_remains()
        except BlockingIOError as error:
            raise RequestError(
                f"--files {folder}: another server uses it; name another folder"
            ) from error
        except OSError as error:
            raise RequestError(f"--files {folder}: {error.strerror}") from error
        files = self.records("file", StoredFile)
        for file in sorted(files, key=lambda each: (each.created_at, each.id)):
            self.take(file.owner, file.bytes, 1)
            self._list(file)

    def _read_salt(self) -> bytes:
        path = self.folder / SALT
        if not path.exists():
            self._write(path, secrets.token_bytes(16))
        return path.read_bytes()

    def _drop_remains(self) -> None:
        """Delete what a server that ended was writing."""
        for path in self.folder.iterdir():
            is_whole = path.with_suffix(".json").exists()
            if PARTIAL.fullmatch(path.name) or (
                CONTENT.fullmatch(path.name) and not is_whole
            ):
                path.unlink()

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
        with open(part, "xb", opener=private) as file:
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

    def check_room(self, owner: str, size: int, count: int = 0) -> None:
        """Raise :class:`ApiError` 400 if a key may not store as much more.

        size: in bytes. count: of files.
        """
        key_bytes, key_files = self._max_key_bytes, self._max_key_files
        bounds = [
            (size, self._max_bytes, self._bytes.total(), "bytes",
             f"the files of this server may have {self._max_bytes} bytes together "
             "(--max-file-bytes)"),
            (count, MAX_FILES, self._count.total(), "files",
             f"this server stores {MAX_FILES} files"),
        ]  # fmt: skip
        if key_bytes < self._max_bytes:
            text = f"the files of a key may have {key_bytes} bytes together"
            text += " (--max-file-bytes-per-key)"
            bounds.insert(0, (size, key_bytes, self._bytes[owner], "bytes", text))
        if key_files < MAX_FILES:
            text = f"a key may store {key_files} of the {MAX_FILES} files"
            bounds.insert(0, (count, key_files, self._count[owner], "files", text))
        for found, most, used, unit, text in bounds:
            if found > max(most - used, 0):
                raise ApiError(
                    400,
                    f"file: no room for {found} {unit}, accepts {max(most - used, 0)} "
                    f"more: {text}; delete some",
                    param="file",
                    code="storage_full",
                )

    def take(self, owner: str, size: int, count: int = 0) -> None:
        """Count what a key has besides, or has no longer; nothing is checked."""
        self._bytes[owner] += size
        self._count[owner] += count

    def add(
        self, owner: str, filename: str, purpose: str, size: int, seconds: int | None
    ) -> StoredFile:
        """Return the record of a new file, whose content is to be written.

        It is found after :meth:`finish`. seconds: until it is deleted. Raises
        :class:`ApiError` 400 without room.
        """
        self.expire()
        self.check_room(owner, size, 1)
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        name = f"file-{secrets.token_hex(12)}"
        self.take(owner, size, 1)
        return StoredFile(name, owner, filename, purpose, size, now, expires)

    def finish(self, file: StoredFile) -> None:
        """List a new file, whose content is whole."""
        self.save(file.id, file)
        self._list(file)

    def _list(self, file: StoredFile) -> None:
        self._files[file.owner][file.id] = file
        if file.expires_at is not None:
            self._next_expiry = min(self._next_expiry, file.expires_at)

    def find(self, owner: str, name: str) -> StoredFile:
        """Return a file of an owner; raises :class:`ApiError` 404."""
        self.expire()
        file = self._files[owner].get(name)
        if file is None:
            raise ApiError(404, f"file: found no file {name!r:.60}", param="file_id")
        return file

    def of(self, owner: str) -> Sequence[StoredFile]:
        """Return the files of an owner, the newest first."""
        self.expire()
        return [*reversed(self._files[owner].values())]

    def delete(self, file: StoredFile) -> None:
        """Delete a file, also one that is not whole."""
        self._files[file.owner].pop(file.id, None)
        self.take(file.owner, -file.bytes, -1)
        for path in (self.folder / f"{file.id}.json", self.path(file.id)):
            path.unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete the files whose time has ended."""
        now = time.time()
        if now < self._next_expiry:
            return
        self._next_expiry = inf
        for files in self._files.values():
            for file in [*files.values()]:
                if file.expires_at is None:
                    continue
                if file.expires_at <= now and not self.is_used(file):
                    self.delete(file)
                else:
                    self._next_expiry = min(self._next_expiry, file.expires_at)


def private(path: str, flags: int) -> int:
    """Open a file that other users can neither read nor change."""
    return os.open(path, flags, 0o600)
