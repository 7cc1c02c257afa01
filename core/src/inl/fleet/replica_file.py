"""The file that several servers read their engines from, and that operators change."""

from __future__ import annotations

import os
import tempfile
from math import inf
from pathlib import Path

from inl.errors import DeviceError, RequestError
from inl.file_lock import locked
from inl.workers.settings import parse_address

DRAIN = "drain"
"""Behind an address: the engine gets no requests."""

MOST_BYTES = 1 << 22

Wanted = dict[str, float | None]
"""Addresses; for a drained engine, the seconds in which its requests may finish."""


class ReplicaFile:
    """``HOST:PORT`` a line, or ``HOST:PORT drain[=SECONDS]``; ``#`` begins a comment.

    seconds: of those without a number. Raises :class:`~inl.errors.RequestError` for
    other lines, and OSError.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self._seconds = path, seconds
        self._seen: tuple[int, ...] = ()

    def news(self) -> Wanted | None:
        """Return the engines; ``None`` if the file is what it was at the last call."""
        status = self.path.stat()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        return self.read()

    def read(self) -> Wanted:
        """Return the engines of the file, in its order."""
        return _wanted(self._lines(), str(self.path), self._seconds)

    def write(self, address: str, wanted: str | None) -> None:
        """Let one engine's line be its address and ``wanted``, or be gone.

        wanted: empty, or "drain=SECONDS"; ``None`` removes it. Other lines stay, those
        of others too that write meanwhile.
        """
        text = None if wanted is None else f"{address} {wanted}".rstrip()
        with locked(self.path.with_name(f"{self.path.name}.lock")):
            lines = self._lines()
            found = [at for at, line in enumerate(lines) if _address(line) == address]
            for at in reversed(found):
                del lines[at]
            if text is not None:
                lines.insert(found[0] if found else len(lines), text)
            self._replace("".join(f"{line}\n" for line in lines))

    def _lines(self) -> list[str]:
        with self.path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RequestError(f"{self.path}: found over {MOST_BYTES} bytes")
        return data.decode("utf-8", "replace").splitlines()

    def _replace(self, text: str) -> None:
        # Whole or not at all, for readers and after a crash. A link stays one.
        path = self.path.resolve()
        mode = path.stat().st_mode & 0o777
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(mode)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _address(line: str) -> str:
    """Return the first word of a line."""
    words = line.partition("#")[0].split()
    return words[0] if words else ""


def _wanted(lines: list[str], where: str, seconds: float) -> Wanted:
    found: Wanted = {}
    for number, line in enumerate(lines, 1):
        address, *rest = line.partition("#")[0].split() or [""]
        if not address:
            continue
        try:
            parse_address(address)
            if address in found or len(rest) > 1:
                raise ValueError
            found[address] = _drain_seconds(rest[0], seconds) if rest else None
        except (DeviceError, ValueError) as error:
            raise RequestError(
                f"{where}, line {number}: found {line!r:.120}, accepted: HOST:PORT, "
                f"and behind it nothing, {DRAIN} or {DRAIN}=SECONDS; each address once"
            ) from error
    return found


def _drain_seconds(word: str, default: float) -> float:
    """Return the seconds of "drain=SECONDS"; raises ValueError for other words."""
    name, has_value, value = word.partition("=")
    seconds = float(value) if has_value else default
    if name != DRAIN or not 0 <= seconds < inf:
        raise ValueError
    return seconds
