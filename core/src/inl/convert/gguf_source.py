"""What a GGUF file is written from: metadata and tensors by their names in the file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.checkpoints.gguf.file import GgufFile
from inl.checkpoints.gguf.names import architecture
from inl.checkpoints.gguf.types import SCALARS
from inl.dtypes import SIZES, HostArray
from inl.errors import TokenizerNotFound

if TYPE_CHECKING:
    from inl.executor.model_loader import LanguageModel

log = logging.getLogger("inl")


class SourceTensor(NamedTuple):
    """A tensor that is read when it is written."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], HostArray]


class GgufSource(NamedTuple):
    """Metadata and tensors of a file to be written.

    metadata: as :class:`~inl.checkpoints.gguf.writer.GgufWriter` takes it. check: is
    called with the path of the file when all tensors named ``rope_*`` are in it.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    check: Callable[[Path], None] | None = None


def source_of_gguf(path: Path) -> GgufSource:
    """Return the metadata and tensors of a GGUF file of any architecture."""
    gguf = GgufFile(path)
    architecture(gguf.metadata, path)  # raises for a part of a split model

    def tensor(name: str) -> SourceTensor:
        entry, file = gguf.tensors[name], gguf.file
        read = file.array if entry.dtype in SIZES else file.rows
        return SourceTensor(entry.dtype, entry.shape, lambda: read(entry))

    metadata = {
        key: typed(value, gguf.kinds[key])
        for key, value in gguf.metadata.items()
        if key != "general.alignment"  # the writer's is the default
    }
    return GgufSource(metadata, {name: tensor(name) for name in gguf.tensors})


def typed(value: Any, kind: int) -> Any:
    """Return a number as the NumPy scalar of its type in the file."""
    if kind not in SCALARS or isinstance(value, bool):
        return value
    return np.dtype(SCALARS[kind].format).type(value)


def source_of_model(language: LanguageModel) -> GgufSource:
    """Return the metadata and tensors of a model in the Hugging Face layout.

    Raises :class:`CheckpointError` for a family, a config or a tokenizer that GGUF
    files cannot describe.
    """
    from inl.convert.gguf_fields import check_same, gguf_family, metadata
    from inl.convert.gguf_tensors import source_tensors
    from inl.convert.gguf_vocabulary import vocabulary
    from inl.executor.model_loader import open_model

    name, family = gguf_family(language)
    fields = metadata(language, name)
    try:
        tokenizer = language.checkpoint.tokenizer()
    except TokenizerNotFound:
        log.warning("%s: no tokenizer; the file has none either", language.name)
    else:
        size = language.config.vocab_size
        fields |= vocabulary(language.checkpoint, tokenizer, size)

    def check(path: Path) -> None:
        written = open_model(path)
        written.checkpoint.close()
        check_same(language, written)

    return GgufSource(fields, source_tensors(language, family), check)
