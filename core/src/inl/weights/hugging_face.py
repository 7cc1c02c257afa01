"""Models by their Hugging Face names: ``org/name``, ``@revision``, ``:file or tag``.

``huggingface_hub`` downloads, and keeps what it has in its own cache; where there is no
network, what is in that cache is used.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from inl.errors import CheckpointError, MissingPackage
from inl.weights.files import read_json, show

NAME: Final = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^:]+))?(:(?P<file>.+))?",
    re.ASCII,
)
FILES: Final = (".gguf", ".safetensors", ".json")
"""Ends of what is meant as a path, though it has one slash."""
INDEX: Final = "model.safetensors.index.json"
BESIDE: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What is read beside the weights, where it is there."""
PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
SECONDS: Final = 10.0
"""How long the list of files may take."""


class HubName(NamedTuple):
    """A model on the hub."""

    repo: str
    revision: str | None
    """A branch, a tag or a commit; ``None`` is the newest."""
    file: str | None
    """A GGUF file, or a part of one's name such as ``Q4_K_M``."""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


def parse_name(text: str) -> HubName | None:
    """Read ``org/name@revision:file``; ``None`` for what is no such name."""
    found = NAME.fullmatch(text) if len(text) < 400 else None
    if not found or found["repo"].endswith(FILES):
        return None
    return HubName(found["repo"], found["revision"], found["file"])


def download(name: HubName) -> Path:
    """Return the model's folder or GGUF file, fetched unless the cache has it.

    Raises :class:`MissingPackage`, or :class:`CheckpointError` where there is no such
    repository, revision or file, or it is gated, or there is no network and the cache
    does not have it.
    """
    hub = _library()
    options = {"revision": name.revision}
    with _errors(hub, name):
        try:
            info = hub.model_info(name.repo, timeout=SECONDS, **options)
        except Exception as error:
            if isinstance(error, _final_errors(hub)):
                raise
            return _cached(hub, name, error)
        files = [str(one.rfilename) for one in info.siblings or ()]
        wanted = choose(name, files)
        if INDEX in wanted:
            index = hub.hf_hub_download(name.repo, INDEX, **options)
            wanted = [*wanted, *_shards(name, Path(index))]
        patterns = [glob.escape(one) for one in wanted]
        folder = hub.snapshot_download(name.repo, allow_patterns=patterns, **options)
    return _place(Path(folder), wanted)


def choose(name: HubName, files: Sequence[str]) -> list[str]:
    """Pick the files that a model needs out of all that its repository has.

    One GGUF where one is asked for, or where there are no safetensors; else config,
    tokenizer and safetensors, of which shards are named by their index.
    """
    ggufs = sorted(one for one in files if one.endswith(".gguf"))
    tensors = [one for one in files if "/" not in one and one.endswith(".safetensors")]
    if name.file is not None:
        return [_one_gguf(name, name.file, ggufs)]
    if INDEX not in files and not tensors:
        return [_only_gguf(name, ggufs)]
    for needed in ("config.json", "tokenizer.json"):
        if needed not in files:
            raise CheckpointError(
                f"{name}: {needed}: not there beside the safetensors; "
                "accepted: a repository with config.json and tokenizer.json, or a GGUF"
            )
    beside = [one for one in BESIDE if one in files]
    if "model.safetensors" in tensors:
        return [*beside, "model.safetensors"]
    if INDEX in files:
        return [*beside, INDEX]
    if len(tensors) != 1:
        raise CheckpointError(
            f"{name}: found {_listed(tensors)}; "
            "accepted: model.safetensors, or shards with an index"
        )
    return [*beside, *tensors]


def _one_gguf(name: HubName, wanted: str, ggufs: Sequence[str]) -> str:
    """The GGUF of this name, or the only one whose name has the tag."""
    tag = re.compile(rf"(?<![a-z0-9]){re.escape(wanted.lower())}(?![a-z0-9_])")
    found = [one for one in ggufs if one == wanted]
    found = found or [one for one in ggufs if tag.search(one.lower())]
    if len(found) != 1:
        raise CheckpointError(
            f"{name}: file: found {show(wanted)}, which "
            + (f"names {_listed(found)}" if found else "no file has in its name")
            + f"; accepted: one of {_listed(ggufs)}"
        )
    return _whole(name, found[0])


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
    if PART.search(file):
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
    return sorted({str(one) for one in weight_map.values()})


def _cached(hub: Any, name: HubName, error: Exception) -> Path:
    """Find the model in the cache, for the network could not be asked."""
    try:
        # No pattern: the folder is wanted, whichever of its files were fetched.
        folder = hub.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=[], local_files_only=True
        )
    except hub.errors.LocalEntryNotFoundError:
        raise CheckpointError(
            f"{name}: not in the cache, and huggingface.co cannot be reached: "
            f"{_first_line(error)}; accepted: a name that was fetched before, or a path"
        ) from error
    files = [
        path.relative_to(folder).as_posix()
        for path in Path(folder).rglob("*")
        if path.is_file()
    ]
    return _place(Path(folder), choose(name, files))


def _place(folder: Path, wanted: Sequence[str]) -> Path:
    """What :func:`~inl.weights.checkpoint.open_checkpoint` opens."""
    return folder / wanted[0] if wanted[0].endswith(".gguf") else folder


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingPackage(
            "huggingface_hub is not installed, which fetches models by name. "
            "Try: pip install 'inl-core[hub]', or give a path"
        ) from error
    return huggingface_hub


def _final_errors(hub: Any) -> tuple[type[Exception], ...]:
    """Answers of the hub, rather than of the network."""
    errors = hub.errors
    return (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    )


@contextmanager
def _errors(hub: Any, name: HubName) -> Iterator[None]:
    """Say in a line what the package says in a page."""
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
            f"{name}: neither a path here nor a repository on huggingface.co; "
            "accepted: a public name; for a private one, `hf auth login` first"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: revision: found {show(name.revision)}, which is not there; "
            f"accepted: a branch, a tag or a commit of {name.repo}"
        ) from error
    except Exception as error:  # the package's errors have no common root
        raise CheckpointError(
            f"{name}: cannot be fetched: {_first_line(error)}; "
            f"accepted: a repository as at {page}, and room for its files"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _listed(files: Sequence[str]) -> str:
    shown = ", ".join(files[:12]) or "none"
    return shown + (", ..." if len(files) > 12 else "")
