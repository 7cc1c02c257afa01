"""Checkpoint interface: tensors, config, tokenizer and chat template of a model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inl.backend.weight_cache import FileIdentity
from inl.checkpoints.files.tensor_file import listing, open_regular, unreadable
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from inl.checkpoints.quantized.kv_cache_scheme import CacheScheme
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

ACCEPTED = (
    "accepted: a folder with config.json and *.safetensors, a .gguf file, "
    "or a folder with exactly one"
)


PROCESSOR = "preprocessor_config.json"


class Checkpoint(ABC):
    """A model on disk. Tensors are read on access, not at construction."""

    path: Path
    config: Mapping[str, Any]
    """Fields of ``config.json`` in the Hugging Face layout."""
    eos_token_ids: tuple[int, ...]
    """Ids of the end-of-text tokens, ascending."""
    generation_config: Mapping[str, Any] = MappingProxyType({})
    """Fields of ``generation_config.json``, or those of GGUF metadata that equal them;
    see :mod:`inl.checkpoints.sampling`."""
    metadata: Mapping[str, str] = MappingProxyType({})
    """Texts in the headers of safetensors files, by the names that files use."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """Texts of the special tokens, such as ``bos_token``."""
    cache_scheme: CacheScheme | None = None
    """The KV cache that a quantized checkpoint was calibrated for."""
    notes: tuple[str, ...] = ()
    """How quantized tensors are stored and loaded, a line each."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return all tensor names, in the Hugging Face layout."""

    @abstractmethod
    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype name and shape of a tensor without reading its data."""

    @abstractmethod
    def tensor(self, name: str) -> HostArray:
        """Read a tensor; the array may be read-only.

        Raises :class:`CheckpointError` for an unknown name.
        """

    def rows(self, name: str, start: int, stop: int) -> HostArray:
        """Read the entries ``[start, stop)`` of the first axis of a tensor.

        Raises as :meth:`tensor`, which reads the others too where a format has no way
        to read these alone.
        """
        whole = self.tensor(name)
        shape = (stop - start, *whole.shape[1:])
        return HostArray(whole.data[start:stop], whole.dtype, shape)

    def row_reader(self, name: str) -> Callable[[int, memoryview], None] | None:  # noqa: ARG002 - for overrides
        """Return a function that reads rows of a quantized tensor from a row on.

        It fills a buffer of bytes. ``None`` if the tensor can only be read whole.
        """
        return None

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in its file, which may be another."""
        return name

    def rounded(self, decoded: str) -> Checkpoint:  # noqa: ARG002 - for overrides
        """Return the checkpoint for a compute dtype of 16 bits: on the same files.

        Its quantized matrices have dtypes whose blocks may round scales and offsets to
        float16. decoded: dtype of those that no blocks store, "float32" or "q8_0".
        """
        return self

    def files(self) -> Sequence[Path]:
        """Return every file that holds tensors; empty if they are not in files."""
        return ()

    def identities(self) -> Mapping[Path, FileIdentity]:
        """Return the identities of the mapped files when they were opened."""
        return {}

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer. Raises :class:`CheckpointError` if it is absent."""

    @property
    @abstractmethod
    def chat_template(self) -> ChatTemplate | None:
        """The chat template with its special tokens; ``None`` if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Returned arrays stay valid; repeated calls do nothing."""

    @property
    def image_processor(self) -> Mapping[str, Any]:
        """Fields of ``preprocessor_config.json``; empty without one.

        Raises :class:`CheckpointError`.
        """
        from inl.checkpoints.files.json_text import read_json

        file = self.path / PROCESSOR
        return read_json(file) if file.is_file() else {}

    def missing(self, name: str) -> CheckpointError:
        """Return the error for an unknown tensor name."""
        return CheckpointError(
            f"{self.path}: tensor {name!r}: not found among {len(self.names())}; "
            "accepted: one of names()"
        )


def open_checkpoint(
    path: str | Path, other: Callable[[Path], Checkpoint | None] = lambda _: None
) -> Checkpoint:
    """Open a checkpoint: a Hugging Face folder, a GGUF file or a folder with one.

    other: opens a path that is none of these, or returns ``None``. Raises
    :class:`CheckpointError` that lists what was found and what is accepted.
    """
    # expanduser of os.path leaves an unknown ~user as it is; pathlib's raises.
    expanded = Path(os.path.expanduser(path))  # noqa: PTH111
    try:
        return _open(expanded, other)
    except OSError as error:
        raise unreadable(expanded, error) from error


def _open(path: Path, other: Callable[[Path], Checkpoint | None]) -> Checkpoint:
    from inl.checkpoints.gguf.checkpoint import GgufCheckpoint

    if path.is_dir():
        if os.path.lexists(path / "config.json"):
            from inl.checkpoints.folder import FolderCheckpoint

            return FolderCheckpoint(path)
        found = _ggufs(path)
        opened = None if found else other(path)
        return opened or GgufCheckpoint(_only_gguf(path, found), path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; {ACCEPTED}")
    with os.fdopen(open_regular(path), "rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == b"GGUF":
        return GgufCheckpoint(path)
    if (opened := other(path)) is not None:
        return opened
    if path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
        raise CheckpointError(
            f"{path}: a {path.suffix[1:]} file alone has no config; "
            f"accepted: its folder, with config.json ({path.parent})"
        )
    raise CheckpointError(f"{path}: found a file that begins {magic!r}; {ACCEPTED}")


def _ggufs(folder: Path) -> list[Path]:
    from inl.checkpoints.gguf.names import is_projector

    return [path for path in folder.glob("*.gguf") if not is_projector(path.name)]


def _only_gguf(folder: Path, ggufs: Sequence[Path]) -> Path:
    if len(ggufs) != 1:
        raise CheckpointError(f"{folder}: found {listing(folder)}; {ACCEPTED}")
    return ggufs[0]
