"""A folder of cache files that only its owner can change.

Files are opened relative to the open folder and without following links, so that no
name is resolved twice; POSIX only.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from types import TracebackType

IS_SUPPORTED: Final = hasattr(os, "O_NOFOLLOW") and hasattr(os, "geteuid")
OTHERS: Final = 0o077
"""Permissions of other users, who have none in the folder."""
OTHERS_WRITE: Final = 0o022
UNFINISHED: Final = ".part"
"""Suffix of files that are being written."""
ABANDONED_SECONDS: Final = 3600
"""Age from which an unfinished file is taken to be abandoned."""
KEY: Final = "key"
KEY_BYTES: Final = 32


class Untrusted(Exception):
    """A file or folder that someone else may have made or changed, or a damaged one."""


class PrivateFolder:
    """An open folder; a context manager.

    Raises :class:`Untrusted` if it belongs to another user or is a link, and OSError.
    Permissions of other users are removed, and a missing folder is created with
    ``create``.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        if path.is_symlink():
            raise Untrusted("is a symbolic link, accepted: a folder")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._folder = os.open(path, flags)
        try:
            facts = os.fstat(self._folder)
            _check_owner(facts)
            if facts.st_mode & OTHERS:
                os.fchmod(self._folder, stat.S_IMODE(facts.st_mode) & ~OTHERS)
        except BaseException:
            os.close(self._folder)
            raise

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; nothing else follows."""
        os.close(self._folder)

    def open(self, name: str) -> BinaryIO:
        """Open a file to read.

        Raises :class:`Untrusted` unless it is a regular file of this user that others
        cannot write, FileNotFoundError, or another OSError.
        """
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if stat.S_ISLNK(self.status(name).st_mode):
            raise Untrusted("is a symbolic link, accepted: a regular file")
        file = os.fdopen(os.open(name, flags, dir_fd=self._folder), "rb", buffering=0)
        try:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise Untrusted("is not a regular file")
            _check_owner(facts)
            if facts.st_mode & OTHERS_WRITE:
                mode = stat.S_IMODE(facts.st_mode)
                raise Untrusted(f"others may write to it: mode {mode:o}")
        except BaseException:
            file.close()
            raise
        return file

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole file; raises as :meth:`open` does, and above ``limit`` bytes."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise Untrusted(f"found {size} bytes, accepted: at most {limit}")
            return file.read(limit)

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], *, replace: bool = True
    ) -> None:
        """Write a file atomically; raises OSError.

        replace: otherwise, raises FileExistsError if there is one.
        """
        partial = f"{name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600, dir_fd=self._folder)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[file.write(view) :]
            self._rename(partial, name, replace=replace)
        except BaseException:
            self.remove(partial)
            raise

    def _rename(self, partial: str, name: str, *, replace: bool) -> None:
        at = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        if not replace:
            try:
                os.link(partial, name, follow_symlinks=False, **at)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                pass
            else:
                os.unlink(partial, dir_fd=self._folder)
                return
        os.rename(partial, name, **at)  # noqa: PTH104 - relative to the open folder

    def status(self, name: str) -> os.stat_result:
        """Status of a file or link; raises OSError."""
        return os.stat(name, dir_fd=self._folder, follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Remove a file or link; returns whether that was possible."""
        try:
            os.unlink(name, dir_fd=self._folder)
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        """Names of all files, in order."""
        return sorted(os.listdir(self._folder))  # noqa: PTH208 - the open folder

    def free_bytes(self) -> int:
        """Bytes that are free on the disk."""
        system = os.fstatvfs(self._folder)
        return system.f_bavail * system.f_frsize

    def disk_bytes(self) -> int:
        """Bytes of the disk."""
        system = os.fstatvfs(self._folder)
        return system.f_blocks * system.f_frsize

    def abandoned(self) -> Iterator[str]:
        """Unfinished files that no process is likely to be writing."""
        for name in self.names():
            with suppress(OSError):
                age = time.time() - self.status(name).st_mtime
                if name.endswith(UNFINISHED) and age > ABANDONED_SECONDS:
                    yield name

    def key(self) -> bytes:
        """Secret of this folder, made by its first use; signs what the folder holds.

        A damaged one is replaced, and nothing is valid that was signed with another.
        Raises OSError.
        """
        new = secrets.token_bytes(KEY_BYTES)
        try:
            key = self.read(KEY, KEY_BYTES)
            if len(key) == KEY_BYTES:
                return key
        except FileNotFoundError:
            with suppress(FileExistsError):
                self.write(KEY, [new], replace=False)
            return self.key()
        except Untrusted:
            pass
        self.write(KEY, [new])
        return new


def signature(key: bytes, *parts: bytes) -> bytes:
    """Keyed digest of 32 bytes, which only who can read the folder computes."""
    digest = hashlib.blake2b(key=key, digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def is_private(facts: os.stat_result) -> bool:
    """Whether only this user, or the administrator, can write a file."""
    if not IS_SUPPORTED:
        return True
    owners = os.geteuid(), 0
    return facts.st_uid in owners and not facts.st_mode & OTHERS_WRITE


def _check_owner(facts: os.stat_result) -> None:
    if facts.st_uid != os.geteuid():
        raise Untrusted(f"belongs to user {facts.st_uid}, not to {os.geteuid()}")
