"""Models in the caches of INL and of Hugging Face: their files, sizes and removal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from inl.checkpoints.hub.resolve import (
    cache_folder,
    default_place,
    find_model,
    stamp_of,
)
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from inl.checkpoints.hub.hugging_face import HubName


def stored_files(name: str) -> list[Path]:
    """Return the files and folders of a model in a cache, which removal removes.

    name: as :func:`~inl.checkpoints.hub.resolve.resolve_model` accepts it, or a GGUF
    file in INL's cache. Raises :class:`CheckpointError` for a model that is in no
    cache, and for a path.
    """
    own = cache_folder() / name
    if Path(name).name == name and name.endswith(".gguf") and own.is_file():
        return [own]
    found = find_model(name)
    if isinstance(found, Path):
        raise CheckpointError(
            f"{name}: is a path; accepted: the name of a model in a cache (inl list)"
        )
    if found is None:
        default = default_place()
        files = [path for path in (default, stamp_of(default)) if path.is_file()]
    else:
        files = _of_hub(found)
    if not files:
        raise CheckpointError(
            f"{name}: is not in a cache; accepted: a name that inl list prints"
        )
    return files


def _of_hub(name: HubName) -> list[Path]:
    """Return the folder of a repository, or one file: its links and what they are."""
    folder = hub_folder(name)
    if name.file is None and name.revision is None:
        return [folder] if folder.is_dir() else []
    from inl.checkpoints.hub.hugging_face import cached

    path = cached(name)
    if path is None:
        return []
    if path.is_dir():
        raise CheckpointError(
            f"{name}: one revision is not removed alone; accepted: {name.repo}, which "
            "removes all of its files"
        )
    blob = path.resolve()
    found = [each for each in folder.glob("snapshots/*/**/*") if each.is_file()]
    links = [each for each in found if each.resolve() == blob]
    if len(links) == len(found):
        return [folder]
    return list(dict.fromkeys([*links, blob]))


def hub_folder(name: HubName) -> Path:
    """Return the folder of a repository in Hugging Face's cache."""
    from inl.checkpoints.hub.hugging_face import library

    library()  # which says how to install it
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files and folders of :func:`stored_files`.

    Raises :class:`CheckpointError` for one that cannot be removed.
    """
    for path in paths:
        try:
            if path.is_dir():
                rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be removed: {error.strerror or error}"
            ) from error


def size_of(paths: Sequence[Path]) -> int:
    """Return the bytes of files, and of the files of folders, without links."""
    files = [
        file for path in paths for file in ([path] if path.is_file() else _files(path))
    ]
    return sum(file.stat().st_size for file in files if not file.is_symlink())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def download_bytes(name: HubName) -> int | None:
    """Return the bytes of the files of a model on the hub, if they are known.

    ``None`` for shards, whose index lists them, and without a network.
    """
    from inl.checkpoints.hub.hugging_face import INDEX, library, select_files

    try:
        info: Any = library().model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=10.0
        )
    except Exception:  # the download says what is wrong
        return None
    sizes = {str(each.rfilename): each.size for each in info.siblings or ()}
    selected = select_files(name, list(sizes))
    found = [sizes[file] for file in selected]
    return None if INDEX in selected or None in found else sum(found)


def arrived_bytes(name: HubName) -> int:
    """Return the bytes of a repository in the cache, with incomplete files."""
    blobs = hub_folder(name) / "blobs"
    total = 0
    for path in blobs.iterdir() if blobs.is_dir() else ():
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total
