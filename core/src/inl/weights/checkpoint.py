"""A checkpoint: a model's tensors, config and text rules, whatever file they are in."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inl.dtypes import HostArray
from inl.errors import CheckpointError
from inl.weights.files import listing, unreadable

if TYPE_CHECKING:
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

ACCEPTED = (
    "accepted: a folder with config.json and *.safetensors, a .gguf file, "
    "or a folder with exactly one"
)


class Checkpoint(ABC):
    """A model as it lies on disk. Nothing is read before it is asked for."""

    path: Path
    config: Mapping[str, Any]
    """As in ``config.json`` of the Hugging Face layout."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text, ascending."""

    @abstractmethod
    def names(self) -> list[str]:
        """Tensors, by their names in the Hugging Face layout."""

    @abstractmethod
    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype name and shape of a tensor, with none of its bytes read."""

    @abstractmethod
    def tensor(self, name: str) -> HostArray:
        """Return a tensor, mapped from the file where its layout is ours already.

        Raises :class:`CheckpointError` for a name that is not there.
        """

    def files(self) -> Sequence[Path]:
        """Every file that tensors come from; empty where they come from elsewhere."""
        return ()

    def drop(self, name: str) -> None:  # noqa: B027 - memory has nothing to give back
        """Give back a tensor's pages, which are read again at its next use.

        Does nothing for a name that is not there.
        """

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer. Raises :class:`CheckpointError` if there is none."""

    @property
    @abstractmethod
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, with the special tokens that it may use."""

    @abstractmethod
    def close(self) -> None:
        """Unmap the files; arrays given out stay valid. Closing twice is allowed."""

    def missing(self, name: str) -> CheckpointError:
        """Return the error for a tensor that is not there."""
        return CheckpointError(
            f"{self.path}: tensor {name!r}: not found among {len(self.names())}; "
            "accepted: one of names()"
        )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model's folder or file.

    Raises :class:`CheckpointError` that says what was found and what is accepted.
    """
    place = Path(os.path.expanduser(path))  # noqa: PTH111 - leaves an unknown ~ alone
    try:
        return _open(place)
    except OSError as error:
        raise unreadable(place, error) from error


def _open(path: Path) -> Checkpoint:
    from inl.weights.folder import FolderCheckpoint
    from inl.weights.gguf_model import GgufCheckpoint

    if path.is_dir():
        if (path / "config.json").is_file():
            return FolderCheckpoint(path)
        return GgufCheckpoint(_only_gguf(path))
    if not path.is_file():
        raise CheckpointError(f"{path}: no file or folder is there; {ACCEPTED}")
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == b"GGUF":
        return GgufCheckpoint(path)
    if path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
        raise CheckpointError(
            f"{path}: a {path.suffix[1:]} file alone has no config; "
            f"accepted: its folder, with config.json ({path.parent})"
        )
    raise CheckpointError(f"{path}: found a file that begins {magic!r}; {ACCEPTED}")


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise CheckpointError(f"{folder}: found {listing(folder)}; {ACCEPTED}")
    return found[0]
