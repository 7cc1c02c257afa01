"""Reader of ``torch.save`` archives: weights in .pt, .pth and .bin files.

A zip archive with one pickle, ``data.pkl``, and a member ``data/KEY`` per storage. The
members are not compressed, so tensors can be read by their offsets. The pickle is
evaluated by :mod:`inl.checkpoints.files.pickle_reader`, which executes no code.
https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any, Final

from inl.checkpoints.files.pickle_reader import read_pickle
from inl.checkpoints.files.pickle_values import StoredTensor
from inl.checkpoints.files.tensor_file import (
    MAX_TENSORS,
    Entry,
    TensorFile,
    fits,
    show,
)
from inl.dtypes import SIZES
from inl.errors import CheckpointError

SUFFIXES: Final = (".pt", ".pth", ".bin")

WRAPPERS: Final = ("model_state_dict", "state_dict", "model")
"""Keys of training checkpoints under which the weights are stored."""

MAX_PICKLE: Final = 64 << 20
"""Size limit of data.pkl in bytes."""
MAX_DIRECTORY: Final = 3 << 20
"""Size limit of the archive's directory in bytes, which has about 100 per member."""
MAX_RANK: Final = 8
MAX_SHARING: Final = 2
"""Limit of the size of all tensors relative to that of the file. Tensors may share
storages, as tied embeddings do, but each is loaded by itself."""


def read_archive(file: TensorFile) -> dict[str, Entry]:
    """Return the entry of every tensor in a ``torch.save`` file.

    Checks every length against the file and executes no code of it. Raises
    :class:`CheckpointError` that names the tensor or the member.
    """
    members = _members(file)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{file.path}: found {len(pickles)} members named data.pkl; accepted: one, "
            "as torch.save writes it"
        )
    root = pickles[0].removesuffix("data.pkl")
    _check_order(file, members, f"{root}byteorder")
    start, stop = _data_range(file, members[pickles[0]])
    if stop - start > MAX_PICKLE:
        raise CheckpointError(
            f"{file.path}: data.pkl: found {stop - start} bytes; accepted: at most "
            f"{MAX_PICKLE}"
        )
    value = read_pickle(file.read(start, stop), f"{file.path}: data.pkl", file.size)
    entries = {
        name: _entry(file, name, tensor, members, f"{root}data/")
        for name, tensor in _weights(file, value).items()
    }
    size = sum(entry.stop - entry.start for entry in entries.values())
    if size > MAX_SHARING * file.size:
        raise CheckpointError(
            f"{file.path}: found tensors of {size} bytes that share storages in a file "
            f"of {file.size}; accepted: at most {MAX_SHARING} times the file"
        )
    return entries


class _Directory(io.RawIOBase):
    """A file for :mod:`zipfile`, which reads the directory of an archive at once."""

    def __init__(self, file: TensorFile) -> None:
        self.file, self.at = file, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.file.size)[whence]
        if self.at < 0:
            raise ValueError("an offset before the file")
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        rest = max(self.file.size - self.at, 0)
        count = rest if size < 0 else min(size, rest)
        if count > MAX_DIRECTORY:
            raise CheckpointError(
                f"{self.file.path}: directory of the archive: found {count} bytes; "
                f"accepted: at most {MAX_DIRECTORY}"
            )
        data = self.file.read(self.at, self.at + count)
        self.at += count
        return data


def _members(file: TensorFile) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(_Directory(file)) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{file.path}: not a zip archive: {error}; accepted: a file written by "
            "torch.save of version 1.6 or later"
        ) from error
    members = {info.filename: info for info in listed}
    if len(members) != len(listed):
        raise CheckpointError(
            f"{file.path}: found duplicate members; accepted: each member once"
        )
    return members


def _data_range(file: TensorFile, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the byte range of a member's data, which follows its local header."""
    where = f"{file.path}: member {show(info.filename)}"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(
            f"{where}: is compressed or encrypted; accepted: stored members"
        )
    at = info.header_offset
    begin = min(max(at, 0), file.size)
    head = file.read(begin, min(begin + 30, file.size))
    lengths = (
        int.from_bytes(head[26:28], "little"),
        int.from_bytes(head[28:30], "little"),
    )
    start = at + 30 + sum(lengths)
    stop = start + info.file_size
    if head[:4] != b"PK\x03\x04" or info.compress_size != info.file_size:
        raise CheckpointError(
            f"{where}: invalid local header; accepted: an undamaged archive"
        )
    if stop > file.size:
        raise CheckpointError(
            f"{where}: ends at byte {stop} of {file.size}; accepted: an undamaged file"
        )
    return start, stop


def _check_order(
    file: TensorFile, members: Mapping[str, zipfile.ZipInfo], name: str
) -> None:
    if name in members:
        start, stop = _data_range(file, members[name])
        order = file.read(start, min(stop, start + 16))
        if order != b"little":
            raise CheckpointError(
                f"{file.path}: byteorder: found {order!r}; accepted: b'little'"
            )


def _weights(file: TensorFile, value: Any) -> dict[str, StoredTensor]:
    """Return the dict of tensors, at the top level or under a key of WRAPPERS."""
    for key in WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
            break
    if not isinstance(value, dict) or not value:
        raise CheckpointError(
            f"{file.path}: found a {type(value).__name__}; accepted: a dict of "
            f"tensors, at the top level or under {', '.join(WRAPPERS)}"
        )
    if len(value) > MAX_TENSORS:
        raise CheckpointError(
            f"{file.path}: found {len(value)} tensors; accepted: at most {MAX_TENSORS}"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{file.path}: {show(name)}: found a {type(tensor).__name__}; "
                "accepted: tensors by name"
            )
    return value


def _entry(
    file: TensorFile,
    name: str,
    tensor: StoredTensor,
    members: Mapping[str, zipfile.ZipInfo],
    root: str,
) -> Entry:
    where = f"{file.path}: tensor {name!r}"
    storage, shape = tensor.storage, tensor.shape
    if len(shape) > MAX_RANK or not fits(shape):
        raise CheckpointError(
            f"{where}: found shape {show(shape)}; accepted: at most {MAX_RANK} axes, "
            "fewer than 2**48 elements"
        )
    if not _is_contiguous(shape, tensor.strides):
        raise CheckpointError(
            f"{where}: found strides {show(tensor.strides)} for shape {show(shape)}; "
            "accepted: contiguous tensors, as x.contiguous() returns them"
        )
    if root + storage.key not in members:
        raise CheckpointError(
            f"{where}: storage {show(storage.key)}: missing; "
            "accepted: a member of the archive"
        )
    start, stop = _data_range(file, members[root + storage.key])
    size = SIZES[storage.dtype]
    begin = start + tensor.offset * size
    end = begin + math.prod(shape) * size
    if end > stop:
        raise CheckpointError(
            f"{where}: ends {end - stop} bytes behind its storage of "
            f"{stop - start} bytes; accepted: tensors within their storage"
        )
    return Entry(storage.dtype, shape, begin, end)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    if len(shape) != len(strides):
        return False
    if 0 in shape:
        return True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
