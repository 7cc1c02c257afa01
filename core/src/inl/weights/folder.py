"""A model in a folder as Hugging Face lays it out: config.json and safetensors.

Where there are no safetensors, one file of torch's is read, without executing it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from inl.dtypes import HostArray
from inl.errors import CheckpointError
from inl.weights.checkpoint import Checkpoint
from inl.weights.files import Entry, MappedFile, listing, read_json, show
from inl.weights.safetensors import read_header
from inl.weights.torch_file import SUFFIXES, read_archive

if TYPE_CHECKING:
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


@final
class FolderCheckpoint(Checkpoint):
    """Reads config.json, generation_config.json, tokenizer files and shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _config(path / "config.json")
        self.eos_token_ids = _eos_ids(
            {
                "config.json": self.config,
                "generation_config.json": _optional(path / "generation_config.json"),
            },
            path,
        )
        self._found: dict[str, tuple[MappedFile, Entry]] = {}
        for name, wanted in _shards(path).items():
            self._add(MappedFile(path / name), wanted)

    def _add(self, file: MappedFile, wanted: set[str] | None) -> None:
        pickled = file.path.suffix in SUFFIXES
        entries = read_archive(file) if pickled else read_header(file)
        absent = (wanted or set()) - set(entries)
        if absent:
            raise CheckpointError(
                f"{file.path}: tensor {min(absent)!r}: not there, though the index "
                "names this file; accepted: every tensor of the index"
            )
        for name, entry in entries.items():
            if name in self._found:
                other = self._found[name][0].path
                raise CheckpointError(
                    f"{file.path}: tensor {name!r}: also in {other}; "
                    "accepted: each tensor once"
                )
            self._found[name] = file, entry

    def names(self) -> list[str]:
        return list(self._found)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name not in self._found:
            raise self.missing(name)
        _, entry = self._found[name]
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> HostArray:
        if name not in self._found:
            raise self.missing(name)
        file, entry = self._found[name]
        return file.array(entry)

    def files(self) -> Sequence[Path]:
        shards = {file.path for file, _ in self._found.values()}
        return self.path / "config.json", *sorted(shards)

    def drop(self, name: str) -> None:
        if name in self._found:
            file, entry = self._found[name]
            file.drop(entry)

    def tokenizer(self) -> Tokenizer:
        from inl.text.tokenizer import Tokenizer

        return Tokenizer.from_file(self.path / "tokenizer.json")

    @property
    def chat_template(self) -> ChatTemplate | None:
        from inl.text.template import ChatTemplate

        settings = _optional(self.path / "tokenizer_config.json")
        where, source = _template(self.path, settings)
        if source is None:
            return None
        return ChatTemplate(
            source,
            where=where,
            bos_token=_token(settings, "bos_token", self.path),
            eos_token=_token(settings, "eos_token", self.path),
        )

    def close(self) -> None:
        for file in {id(file): file for file, _ in self._found.values()}.values():
            file.close()


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise CheckpointError(
            f"{path}: architectures: found {show(found)}; accepted: a list of names"
        )
    return config


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _shards(path: Path) -> dict[str, set[str] | None]:
    """Files to read, and the tensors that the index promises in each."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return dict(_indexed(index))
    if (path / "model.safetensors").is_file():
        return {"model.safetensors": None}
    found = sorted(file.name for file in path.glob("*.safetensors"))
    found = found or sorted(
        file.name
        for pattern in ("*.pt", "*.pth", "pytorch_model.bin")
        for file in path.glob(pattern)
    )
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: found {', '.join(found) or listing(path)}; accepted: "
            "model.safetensors, model.safetensors.index.json with its shards, or "
            "exactly one *.safetensors, else exactly one *.pt, *.pth or "
            "pytorch_model.bin"
        )
    return {found[0]: None}


def _indexed(index: Path) -> dict[str, set[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map: found {show(weight_map)}; "
            "accepted: an object from tensor names to file names"
        )
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        # A shard lies in the folder itself: an index may not reach for other files.
        if not isinstance(name, str) or not _is_shard(index.parent, name):
            raise CheckpointError(
                f"{index}: weight_map: {show(tensor)}: found {show(name)}; "
                "accepted: the name of a file that is in the same folder"
            )
        shards.setdefault(name, set()).add(tensor)
    return shards


def _is_shard(folder: Path, name: str) -> bool:
    plain = "/" not in name and "\\" not in name
    return plain and os.path.isfile(folder / name)  # noqa: PTH113 - false for any text


def _eos_ids(configs: Mapping[str, Mapping[str, Any]], path: Path) -> tuple[int, ...]:
    """Merge ``eos_token_id`` of every config: an id, a list of ids, or null."""
    ids: set[int] = set()
    for name, fields in configs.items():
        found = fields.get("eos_token_id")
        each = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(one) is int and one >= 0 for one in each):
            raise CheckpointError(
                f"{path / name}: eos_token_id: found {show(found)}; "
                "accepted: an id from 0, or a list of ids"
            )
        ids.update(each)
    return tuple(sorted(ids))


def _template(path: Path, settings: Mapping[str, Any]) -> tuple[str, str | None]:
    """Find the chat template: its own file, or a field of tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return str(file), file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{file}: cannot be read: {error}; accepted: a file in UTF-8"
            ) from error
    where = f"{path / 'tokenizer_config.json'}: chat_template"
    found = settings.get("chat_template")
    if isinstance(found, list):
        default = [
            one.get("template")
            for one in found
            if isinstance(one, dict) and one.get("name") == "default"
        ]
        found = default[0] if default else None
    if found is None or isinstance(found, str):
        return where, found
    raise CheckpointError(
        f"{where}: found {show(found)}; accepted: a string, or a list with a default"
    )


def _token(settings: Mapping[str, Any], name: str, path: Path) -> str:
    """Return a special token: its text, or an object that holds it as ``content``."""
    found = settings.get(name)
    if isinstance(found, dict):
        found = found.get("content")
    if found is None or isinstance(found, str):
        return found or ""
    raise CheckpointError(
        f"{path / 'tokenizer_config.json'}: {name}: found {show(found)}; "
        "accepted: a string, or an object with content"
    )
