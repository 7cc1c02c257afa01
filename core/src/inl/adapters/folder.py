"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors.

https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inl.adapters.config import MERGE, AdapterConfig
from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.files.safetensors import read_header
from inl.checkpoints.files.tensor_file import Entry, TensorFile, listing
from inl.errors import CheckpointError, WeightMismatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""Beginning of the tensor names; the base model's module name follows."""
SUFFIXES: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}
"""End of a tensor's name, and which matrix of the pair it is."""
FLOATS: Final = ("float16", "bfloat16", "float32", "float64")


class LoraPair(NamedTuple):
    """The matrices of one module, float32."""

    a: NDArray[np.float32]
    """[r, K]."""
    b: NDArray[np.float32]
    """[N, r], times the module's scale."""


class Adapter(NamedTuple):
    """An adapter in host memory."""

    path: str
    digest: str
    """sha256 in hex of what it computes: names, shapes and values of its matrices."""
    modules: Mapping[str, LoraPair]
    """By module name of the base model, such as
    "model.layers.0.self_attn.q_proj"."""


def read_adapter(
    path: str | Path, modules: Mapping[str, tuple[int, int]], max_rank: int
) -> Adapter:
    """Read an adapter of a base model and check it.

    modules: [N, K] of each linear layer that may have one, by module name. max_rank:
    largest accepted rank. Raises :class:`~inl.errors.CheckpointError` for files that
    are damaged or need what is not supported, and
    :class:`~inl.errors.WeightMismatch` for an adapter of another base model or rank.
    """
    folder = _adapter_folder(path)
    config = AdapterConfig(read_json(folder / CONFIG, folder), folder / CONFIG)
    file = TensorFile(folder / TENSORS, folder)
    try:
        pairs = _pairs(read_header(file).entries, file.path)
        for module, pair in pairs.items():
            _check_shapes(module, pair, modules, config.rank(module), file.path)
            _check_rank(module, pair[0].shape[0], max_rank, file.path)
        read = {
            module: _read(file, pairs[module], module, config.scale(module))
            for module in sorted(pairs)
        }
    finally:
        file.close()
    return Adapter(str(folder.absolute()), _digest(read), read)


def highest_rank(path: str | Path) -> int:
    """Return the highest rank that an adapter's config states.

    Raises :class:`~inl.errors.CheckpointError`.
    """
    folder = _adapter_folder(path)
    config = AdapterConfig(read_json(folder / CONFIG, folder), folder / CONFIG)
    return config.highest_rank


def _adapter_folder(path: str | Path) -> Path:
    """Return a folder with the two files of an adapter; raises without one."""
    folder = Path(path)
    for name in (CONFIG, TENSORS):
        if not os.path.lexists(folder / name):
            found = listing(folder) if folder.is_dir() else "no such folder"
            raise CheckpointError(
                f"adapter {folder}: {name}: missing ({found}); accepted: a PEFT folder "
                f"with {CONFIG} and {TENSORS}"
            )
    return folder


def _pairs(entries: Mapping[str, Entry], path: Path) -> dict[str, tuple[Entry, Entry]]:
    """Return the entries of A and B by module."""
    found: dict[str, list[Entry | None]] = {}
    for name, entry in entries.items():
        module, place = _parsed(name)
        if place is None or entry.dtype not in FLOATS or len(entry.shape) != 2:
            raise CheckpointError(
                f"{path}: tensor {name!r}: found {entry.dtype} {list(entry.shape)}; "
                f"accepted: matrices {PREFIX}MODULE.lora_A.weight and "
                f"lora_B.weight of floating-point numbers; {MERGE}"
            )
        found.setdefault(module, [None, None])[place] = entry
    if not found:
        raise CheckpointError(f"{path}: found no tensors; accepted: one and more")
    pairs: dict[str, tuple[Entry, Entry]] = {}
    for module, (a, b) in found.items():
        if a is None or b is None:
            missing = "lora_A" if a is None else "lora_B"
            raise CheckpointError(
                f"{path}: tensor '{PREFIX}{module}.{missing}.weight': missing; "
                "accepted: both matrices of each module"
            )
        pairs[module] = a, b
    return pairs


def _parsed(name: str) -> tuple[str, int | None]:
    """Return the module of a tensor, and which matrix it is."""
    for suffix, place in SUFFIXES.items():
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix), place
    return name, None


def _check_shapes(
    module: str,
    pair: tuple[Entry, Entry],
    modules: Mapping[str, tuple[int, int]],
    rank: int,
    path: Path,
) -> None:
    if module not in modules:
        known = sorted({name.rpartition(".")[2] for name in modules})
        raise WeightMismatch(
            f"{path}: module {module!r}: found an adapter for it, but "
            f"{_reason(module)}; accepted: {', '.join(known) or 'none'} of its layers, "
            f"such as {min(modules, default='none')!r}; {MERGE}"
        )
    rows, columns = modules[module]
    for name, entry, shape in (
        ("lora_A", pair[0], (rank, columns)),
        ("lora_B", pair[1], (rows, rank)),
    ):
        if entry.shape != shape:
            raise WeightMismatch(
                f"{path}: tensor '{PREFIX}{module}.{name}.weight': found "
                f"{list(entry.shape)}; accepted: {list(shape)}, for rank {rank} of "
                f"{CONFIG} and this base model"
            )


def _reason(module: str) -> str:
    """Return why a module has no adapters."""
    if ".experts" in module:
        return "adapters of experts are not computed"
    if ".layers." not in module:
        return "only linear layers of decoder layers have adapters"
    return "this base model has no such linear layer"


def _check_rank(module: str, rank: int, max_rank: int, path: Path) -> None:
    if rank > max_rank:
        raise WeightMismatch(
            f"{path}: module {module!r}: found rank {rank}; accepted: up to "
            f"{max_rank} (EngineConfig.max_adapter_rank)"
        )


def _read(
    file: TensorFile, pair: tuple[Entry, Entry], module: str, scale: float
) -> LoraPair:
    a, b = (
        _values(file, entry, f"{file.path}: {module}.{name}")
        for entry, name in zip(pair, ("lora_A", "lora_B"), strict=True)
    )
    return LoraPair(a, np.asarray(b * np.float64(scale), np.float32))


def _values(file: TensorFile, entry: Entry, where: str) -> NDArray[np.float32]:
    values = dequantize(file.array(entry), where)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{where}: found NaN or infinity; accepted: finite numbers"
        )
    return values


def _digest(modules: Mapping[str, LoraPair]) -> str:
    digest = sha256()
    for name, pair in modules.items():
        for matrix in pair:
            digest.update(f"{name} {matrix.shape}\n".encode())
            digest.update(np.ascontiguousarray(matrix, "<f4").tobytes())
    return digest.hexdigest()
