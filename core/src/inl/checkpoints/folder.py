"""Checkpoints in the Hugging Face folder layout: config.json with safetensors.

A folder without safetensors may hold one ``torch.save`` file, whose pickle is parsed
and never executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.files.safetensors import Header, read_header
from inl.checkpoints.files.tensor_file import Entry, TensorFile, listing, show
from inl.checkpoints.files.tokenizer_settings import (
    CONFIG,
    TokenizerSettings,
    optional_json,
)
from inl.checkpoints.files.torch_file import SUFFIXES, read_archive
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from inl.backend.weight_cache import FileIdentity
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


GENERATION: Final = "generation_config.json"
INDEX: Final = "model.safetensors.index.json"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
"""Of shards that torch has saved; read where there are no safetensors."""
QUANTIZATION: Final = "quantization_config"
WHOLE: Final = "model.safetensors"
MODELOPT: Final = "hf_quant_config.json"
"""Of ModelOpt, whose older versions do not write a ``quantization_config``."""


@final
class FolderCheckpoint(Checkpoint):
    """Checkpoint of config.json, generation_config.json, tokenizer files and shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _config(path / "config.json")
        self._settings = TokenizerSettings(path)
        self.generation_config = optional_json(path / GENERATION)
        self.special_tokens = self._settings.special_tokens
        self.eos_token_ids = _eos_ids(
            {
                "config.json": self.config,
                GENERATION: self.generation_config,
                CONFIG: {"eos_token_id": self._settings.end_token_id()},
            },
            path,
        )
        self._tensors: dict[str, tuple[TensorFile, Entry]] = {}
        self.metadata: dict[str, str] = {}
        files, placed = _shards(path)
        for name in files:
            self._add(TensorFile(path / name, path), placed)

    def _add(self, file: TensorFile, placed: Mapping[str, str]) -> None:
        """Add a shard; ``placed`` is the shard of each tensor by the index."""
        pickled = file.path.suffix in SUFFIXES
        header = Header(read_archive(file), {}) if pickled else read_header(file)
        entries = header.entries
        shard = file.path.name
        absent = {name for name, each in placed.items() if each == shard} - set(entries)
        if absent:
            raise CheckpointError(
                f"{file.path}: tensor {min(absent)!r}: missing, but the index places "
                "it in this file; accepted: every tensor of the index"
            )
        for name, entry in entries.items():
            if placed.get(name, shard) != shard:
                continue
            if name in self._tensors:
                other = self._tensors[name][0].path
                raise CheckpointError(
                    f"{file.path}: tensor {name!r}: also in {other}; "
                    "accepted: each tensor once"
                )
            self._tensors[name] = file, entry
        self.metadata.update(header.metadata)

    def names(self) -> list[str]:
        return list(self._tensors)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._tensors:
            raise self.missing(name)
        _, entry = self._tensors[name]
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> HostArray:
        if name not in self._tensors:
            raise self.missing(name)
        file, entry = self._tensors[name]
        return file.array(entry)

    def rows(self, name: str, start: int, stop: int) -> HostArray:
        if name not in self._tensors:
            raise self.missing(name)
        file, entry = self._tensors[name]
        count, *rest = entry.shape
        size = (entry.stop - entry.start) // count
        start, stop, _ = slice(start, stop).indices(count)
        part = entry._replace(
            shape=(stop - start, *rest),
            start=entry.start + start * size,
            stop=entry.start + stop * size,
        )
        return replace(file.array(part), origin=None)

    def files(self) -> Sequence[Path]:
        shards = {file.path for file, _ in self._tensors.values()}
        return self.path / "config.json", *sorted(shards)

    def identities(self) -> Mapping[Path, FileIdentity]:
        return {file.path: file.identity for file, _ in self._tensors.values()}

    def tokenizer(self) -> Tokenizer:
        return self._settings.tokenizer(self.config.get("model_type"))

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._settings.chat_template()

    def close(self) -> None:
        for file in {id(file): file for file, _ in self._tensors.values()}.values():
            file.close()


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path, path.parent)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{path}: architectures: found {show(names)}; accepted: a list of names"
        )
    quantized = optional_json(path.parent / MODELOPT).get("quantization")
    # Without "quant_algo" the file is only about the KV cache.
    if isinstance(quantized, dict) and quantized.get("quant_algo"):
        config.setdefault(QUANTIZATION, {"quant_method": "modelopt", **quantized})
    return config


def _shards(path: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return the weight files and, if there is an index, the file of each tensor."""
    # An index beside a whole file is of shards that were merged.
    if os.path.lexists(path / WHOLE):
        return [WHOLE], {}
    files = sorted(file.name for file in path.glob("*.safetensors"))
    for index in (INDEX,) if files else (INDEX, PICKLED_INDEX):
        if os.path.lexists(path / index):
            placed = _indexed(path / index)
            return list(dict.fromkeys(placed.values())), placed
    files = files or sorted(
        file.name
        for pattern in ("*.pt", "*.pth", "pytorch_model.bin")
        for file in path.glob(pattern)
    )
    if len(files) != 1:
        raise CheckpointError(
            f"{path}: found {', '.join(files) or listing(path)}; accepted: "
            f"model.safetensors, {INDEX} with its shards, or exactly one "
            "*.safetensors; else pytorch_model.bin, its shards with "
            f"{PICKLED_INDEX}, or exactly one *.pt or *.pth"
        )
    return files, {}


def _indexed(index: Path) -> Mapping[str, str]:
    """Read the file of each tensor from an index; raises for a file that is missing."""
    placed = read_json(index, index.parent).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(
            f"{index}: weight_map: found {show(placed)}; "
            "accepted: an object from tensor names to file names"
        )
    for tensor, name in placed.items():
        # Shards must be in the folder itself: an index cannot name other files.
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{index}: weight_map: {show(tensor)}: found {show(name)}; "
                "accepted: the name of a file that is in the same folder"
            )
    names = sorted(set(placed.values()))
    missing = [name for name in names if not os.path.lexists(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{index}: weight_map: {show(missing[0])}: not in the folder, one of "
            f"{len(missing)} of {len(names)} files that are missing; accepted: every "
            "file of the index, so download or copy the others too"
        )
    return placed


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return not {"/", "\\"} & set(name) and name not in ("", ".", "..")


def _eos_ids(configs: Mapping[str, Mapping[str, Any]], path: Path) -> tuple[int, ...]:
    """Merge ``eos_token_id`` of every config: an id, a list of ids, or null."""
    merged: set[int] = set()
    for name, fields in configs.items():
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(index) is int and index >= 0 for index in ids):
            raise CheckpointError(
                f"{path / name}: eos_token_id: found {show(value)}; "
                "accepted: an id from 0, or a list of ids"
            )
        merged.update(ids)
    return tuple(sorted(merged))
