"""Downloads from the Hugging Face hub: ``org/name``, ``@revision``, ``:file or tag``.

``huggingface_hub`` downloads to its own cache. Without a network, a cached model is
used.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.files.tokenizer_settings import (
    ADDED,
    CONFIG,
    PIECES,
    RANKS,
    RULES,
    TEMPLATE_FILES,
)
from inl.checkpoints.gguf.names import is_projector
from inl.checkpoints.hub.disk_space import is_full, no_space
from inl.errors import CheckpointError, MissingPackage
from inl.install_command import install_command

NAME: Final = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^:]+))?(:(?P<file>.+))?",
    re.ASCII,
)
FILES: Final = (".gguf", ".safetensors", ".json")
"""Suffixes of paths, which are not repository names."""
INDEX: Final = "model.safetensors.index.json"
COMPANIONS: Final = (
    "config.json",
    "generation_config.json",
    RULES,
    PIECES,
    RANKS,
    CONFIG,
    ADDED,
    "special_tokens_map.json",
    *TEMPLATE_FILES.values(),
)
"""Files that are downloaded with the weights, if present."""
SPLIT_PART: Final = re.compile(r"-\d{5}-of-(?!00001\.gguf)\d{5}\.gguf$")
"""A file of several; part 1 of 1 is whole."""
TIMEOUT_SECONDS: Final = 10.0
"""Time limit for listing the files of a repository."""


class HubName(NamedTuple):
    """Name of a model on the hub."""

    repo: str
    revision: str | None
    """Branch, tag or commit; ``None`` for the newest."""
    file: str | None
    """GGUF file, or a part of its name such as ``Q4_K_M``."""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


def parse_name(text: str) -> HubName | None:
    """Parse ``org/name@revision:file``; ``None`` for any other text."""
    match = NAME.fullmatch(text) if len(text) < 400 else None
    if not match or match["repo"].endswith(FILES):
        return None
    return HubName(match["repo"], match["revision"], match["file"])


def download(name: HubName) -> Path:
    """Return the folder or GGUF file of a model, downloading it if it is not cached.

    Raises :class:`MissingPackage` without ``huggingface_hub``, and
    :class:`CheckpointError` if the repository, revision or file does not exist or is
    gated, or there is no network and the model is not cached.
    """
    hub = library()
    options = {"revision": name.revision}
    with _errors(hub, name):
        try:
            info = hub.model_info(name.repo, timeout=TIMEOUT_SECONDS, **options)
        except Exception as error:
            if isinstance(error, _hub_errors(hub)):
                raise
            return _cached(hub, name, error)
        files = [str(sibling.rfilename) for sibling in info.siblings or ()]
        selected = select_files(name, files)
        if INDEX in selected:
            index = hub.hf_hub_download(name.repo, INDEX, **options)
            selected = [*selected, *_shards(name, Path(index))]
        patterns = [glob.escape(file) for file in selected]
        folder = hub.snapshot_download(name.repo, allow_patterns=patterns, **options)
    return _checkpoint_path(Path(folder), selected)


def select_files(name: HubName, files: Sequence[str]) -> list[str]:
    """Select the files of a repository that the model needs.

    Returns one GGUF file if ``name`` specifies one or there are no safetensors; else
    config, tokenizer and safetensors (for shards their index, which lists them).
    """
    ggufs = sorted(
        file for file in files if file.endswith(".gguf") and not is_projector(file)
    )
    tensors = [
        file for file in files if "/" not in file and file.endswith(".safetensors")
    ]
    if name.file is not None:
        return [_one_gguf(name, name.file, ggufs)]
    if INDEX not in files and not tensors:
        return [_only_gguf(name, ggufs)]
    for needed in (("config.json",), (RULES, PIECES, RANKS)):
        if not set(needed) & set(files):
            raise CheckpointError(
                f"{name}: {' or '.join(needed)}: missing from the repository; "
                f"accepted: safetensors with config.json and {RULES}, {PIECES} or "
                f"{RANKS}, or a GGUF"
            )
    companions = [file for file in COMPANIONS if file in files]
    if "model.safetensors" in tensors:
        return [*companions, "model.safetensors"]
    if INDEX in files:
        return [*companions, INDEX]
    if len(tensors) != 1:
        raise CheckpointError(
            f"{name}: found {_listed(tensors)}; "
            "accepted: model.safetensors, or shards with an index"
        )
    return [*companions, *tensors]


def _one_gguf(name: HubName, file: str, ggufs: Sequence[str]) -> str:
    """Return the GGUF called ``file``, or the only one with this tag in its name."""
    tag = re.compile(rf"(?<![a-z0-9]){re.escape(file.lower())}(?![a-z0-9_])")
    matches = [gguf for gguf in ggufs if gguf == file]
    matches = matches or [gguf for gguf in ggufs if tag.search(gguf.lower())]
    if len(matches) != 1:
        raise CheckpointError(
            f"{name}: file: found {show(file)}, which matches "
            f"{_listed(matches) if matches else 'no file'}; "
            f"accepted: one of {_listed(ggufs)}"
        )
    return _whole(name, matches[0])


def _only_gguf(name: HubName, ggufs: Sequence[str]) -> str:
    if not ggufs:
        raise CheckpointError(
            f"{name}: found neither safetensors nor GGUF; accepted: a repository "
            "with model.safetensors or a .gguf file"
        )
    if len(ggufs) > 1:
        raise CheckpointError(
            f"{name}: found {len(ggufs)} GGUF files; accepted: one of them, as "
            f"{name}:FILE or {name}:TAG ({_listed(ggufs)})"
        )
    return _whole(name, ggufs[0])


def _whole(name: HubName, file: str) -> str:
    if SPLIT_PART.search(file):
        raise CheckpointError(
            f"{name}: file: found {file!r}, a part of a split model; accepted: a whole "
            "model in one file (llama-gguf-split --merge joins the parts)"
        )
    return file


def _shards(name: HubName, index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{name}: {INDEX}: weight_map: found {show(weight_map)}; "
            "accepted: an object from tensor names to file names"
        )
    return sorted({str(file) for file in weight_map.values()})


def cached(name: HubName) -> Path | None:
    """Return the cached folder or GGUF file of a model, if it is cached."""
    try:
        return _cached(library(), name, LookupError("no network was asked"))
    except (CheckpointError, MissingPackage):
        return None


def _cached(hub: Any, name: HubName, error: Exception) -> Path:
    """Return the cached model after ``error`` of the network."""
    try:
        # Without patterns: returns the folder, whichever files it contains.
        folder = hub.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=[], local_files_only=True
        )
    except hub.errors.LocalEntryNotFoundError:
        raise CheckpointError(
            f"{name}: not in the cache, and huggingface.co cannot be reached: "
            f"{_first_line(error)}; accepted: a model fetched before, or a path"
        ) from error
    files = [
        path.relative_to(folder).as_posix()
        for path in Path(folder).rglob("*")
        if path.is_file()
    ]
    return _checkpoint_path(Path(folder), select_files(name, files))


def _checkpoint_path(folder: Path, files: Sequence[str]) -> Path:
    """Return the path for :func:`~inl.checkpoints.checkpoint.open_checkpoint`."""
    return folder / files[0] if files[0].endswith(".gguf") else folder


def library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingPackage(
            "huggingface_hub, which downloads models by name, is not installed. "
            f"Try: {install_command('inl-core[hub]')}, or a local path"
        ) from error
    return huggingface_hub


def _hub_errors(hub: Any) -> tuple[type[Exception], ...]:
    """Return the error types raised by the hub itself, not by the network."""
    errors = hub.errors
    return (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    )


@contextmanager
def _errors(hub: Any, name: HubName) -> Iterator[None]:
    """Convert errors of ``huggingface_hub`` to one-line CheckpointErrors."""
    errors = hub.errors
    page = f"https://huggingface.co/{name.repo}"
    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: gated: accept its terms at {page}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: neither a local path nor a repository on huggingface.co; "
            "accepted: a public name; for a private one, `hf auth login` first"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: revision: found {show(name.revision)}, which does not exist; "
            f"accepted: a branch, a tag or a commit of {name.repo}"
        ) from error
    except Exception as error:  # the package's errors have no common base class
        if is_full(error):
            folder = Path(hub.constants.HF_HUB_CACHE)
            raise no_space(str(name), folder, None) from error
        raise CheckpointError(
            f"{name}: cannot be downloaded: {_first_line(error)}; "
            f"accepted: a repository as at {page}, and enough disk space"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _listed(files: Sequence[str]) -> str:
    shown = ", ".join(files[:12]) or "none"
    return shown + (", ..." if len(files) > 12 else "")
