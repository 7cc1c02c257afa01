"""The zip format of ``torch.save``: weights in .pt, .pth and .bin files.

An archive with one pickle, ``data.pkl``, and a member ``data/KEY`` for each storage,
none of them compressed, so that tensors can be mapped. The pickle is read by
:mod:`inl.weights.pickle_reader`, which executes nothing.
https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from typing import Any, Final

from inl.dtypes import SIZES
from inl.errors import CheckpointError
from inl.weights.files import Entry, MappedFile, fits, show
from inl.weights.pickle_reader import StoredTensor, read_pickle

SUFFIXES: Final = (".pt", ".pth", ".bin")

WRAPPERS: Final = ("model_state_dict", "state_dict", "model")
"""Keys under which training programs put the weights, beside other things."""

MAX_PICKLE: Final = 64 << 20
MAX_RANK: Final = 8


def read_archive(file: MappedFile) -> dict[str, Entry]:
    """Find every tensor of a file that ``torch.save`` wrote.

    Every length is checked against the file. Raises :class:`CheckpointError` that names
    the tensor or the member; never runs anything of the file.
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
    start, stop = _place(file, members[pickles[0]])
    if stop - start > MAX_PICKLE:
        raise CheckpointError(
            f"{file.path}: data.pkl: found {stop - start} bytes; accepted: at most "
            f"{MAX_PICKLE}"
        )
    found = read_pickle(file.buffer[start:stop], f"{file.path}: data.pkl")
    return {
        name: _entry(file, name, tensor, members, f"{root}data/")
        for name, tensor in _weights(file, found).items()
    }


def _members(file: MappedFile) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(file.path) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{file.path}: not a zip archive: {error}; accepted: what torch.save "
            "writes since version 1.6"
        ) from error
    members = {info.filename: info for info in listed}
    if len(members) != len(listed):
        raise CheckpointError(
            f"{file.path}: found a member twice; accepted: each member once"
        )
    return members


def _place(file: MappedFile, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Bytes of a member's data: behind its local header, which has its own lengths."""
    where = f"{file.path}: member {show(info.filename)}"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(
            f"{where}: is compressed or encrypted; accepted: stored as it is"
        )
    at = info.header_offset
    head = file.buffer[max(at, 0) : max(at, 0) + 30]
    lengths = (
        int.from_bytes(head[26:28], "little"),
        int.from_bytes(head[28:30], "little"),
    )
    start = at + 30 + sum(lengths)
    stop = start + info.file_size
    if head[:4] != b"PK\x03\x04" or info.compress_size != info.file_size:
        raise CheckpointError(
            f"{where}: has no header of its own; accepted: an undamaged archive"
        )
    if stop > file.size:
        raise CheckpointError(
            f"{where}: ends at byte {stop} of {file.size}; accepted: an undamaged file"
        )
    return start, stop


def _check_order(
    file: MappedFile, members: Mapping[str, zipfile.ZipInfo], name: str
) -> None:
    if name in members:
        start, stop = _place(file, members[name])
        found = file.buffer[start : min(stop, start + 16)]
        if found != b"little":
            raise CheckpointError(
                f"{file.path}: byteorder: found {found!r}; accepted: b'little'"
            )


def _weights(file: MappedFile, found: Any) -> dict[str, StoredTensor]:
    """The dict of tensors, which may be wrapped."""
    for key in WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{file.path}: found a {type(found).__name__}; accepted: a dict of "
            f"tensors, perhaps under {', '.join(WRAPPERS)}"
        )
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{file.path}: {show(name)}: found a {type(tensor).__name__}; "
                "accepted: names of tensors"
            )
    return found


def _entry(
    file: MappedFile,
    name: str,
    tensor: StoredTensor,
    members: Mapping[str, zipfile.ZipInfo],
    root: str,
) -> Entry:
    where = f"{file.path}: tensor {name!r}"
    storage, shape = tensor.storage, tensor.shape
    if len(shape) > MAX_RANK or not fits(shape):
        raise CheckpointError(f"{where}: found shape {show(shape)}, which is too large")
    if not _is_contiguous(shape, tensor.strides):
        raise CheckpointError(
            f"{where}: found strides {show(tensor.strides)} for shape {show(shape)}; "
            "accepted: rows one after the other, as x.contiguous() makes them"
        )
    if root + storage.key not in members:
        raise CheckpointError(
            f"{where}: lies in {show(storage.key)}; accepted: a member of the archive"
        )
    start, stop = _place(file, members[root + storage.key])
    size = SIZES[storage.dtype]
    begin = start + tensor.offset * size
    end = begin + math.prod(shape) * size
    if end > stop:
        raise CheckpointError(
            f"{where}: ends {end - stop} bytes behind its storage, which holds "
            f"{stop - start}; accepted: tensors within theirs"
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
