"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors.

Only plain LoRA is read: a field that would change the result in another way is refused
by name. https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.files.safetensors import read_header
from inl.checkpoints.files.tensor_file import Entry, TensorFile, listing, show
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

ACCEPTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values of fields that have an effect here or at their other values."""

READ: Final = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")

WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
        "layers_pattern", "layers_to_transform", "lora_dropout", "peft_version",
        "revision", "runtime_config", "target_modules", "task_type",
        "qalora_group_size", "loftq_config", "eva_config", "corda_config",
        "megatron_core", "ensure_weight_tying",
    }
)  # fmt: skip
"""Fields used in training only, and those that follow from the tensors' names."""

PLAIN_KEY: Final = re.compile(r"[\w.]+")
"""Keys of patterns that are read; PEFT takes any regular expression."""


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
    config = _Config(read_json(folder / CONFIG, folder), folder / CONFIG)
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
    config = _Config(read_json(folder / CONFIG, folder), folder / CONFIG)
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


class _Config:
    """The fields of adapter_config.json that are used."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self._fields, self._path = fields, path
        for name, accepted in ACCEPTED.items():
            value = fields.get(name, accepted[0])
            if not any(value is each or value == each for each in accepted):
                raise self._error(name, value, " or ".join(map(str, accepted)))
        for name, value in fields.items():
            if name not in (*ACCEPTED, *READ, *WITHOUT_EFFECT) and value:
                raise self._error(name, value, "no such field, null or false")
        self._rank = self._number("r", int)
        self._alpha = self._number("lora_alpha", int | float)
        self._ranks = self._pattern("rank_pattern", int)
        self._alphas = self._pattern("alpha_pattern", int | float)
        self._rs = fields.get("use_rslora") or False
        if not isinstance(self._rs, bool):
            raise self._error("use_rslora", self._rs, "true or false")

    def rank(self, module: str) -> int:
        """Return the rank of a module."""
        return int(_matching(self._ranks, module, self._rank))

    @property
    def highest_rank(self) -> int:
        """The highest rank of any module."""
        return int(max(self._rank, *self._ranks.values(), 1))

    def scale(self, module: str) -> float:
        """Return the factor on ``B A``: alpha / r, or alpha / sqrt(r)."""
        rank = self.rank(module)
        alpha = float(_matching(self._alphas, module, self._alpha))
        return alpha / (rank**0.5 if self._rs else rank)

    def _number(self, name: str, kind: Any) -> Any:
        value = self._fields.get(name)
        if not _is_positive(value, kind):
            raise self._error(name, value, "a number above 0")
        return value

    def _pattern(self, name: str, kind: Any) -> dict[str, Any]:
        pattern = self._fields.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            PLAIN_KEY.fullmatch(key) and _is_positive(value, kind)
            for key, value in pattern.items()
        ):
            accepted = "an object of module names, without wildcards, and numbers"
            raise self._error(name, pattern, accepted)
        return pattern

    def _error(self, name: str, value: object, accepted: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {name}: found {show(value)}; accepted: {accepted}"
        )


def _is_positive(value: object, kind: Any) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    return bool(0 < value < 2**31)


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that is the end of a module's name."""
    for key, value in pattern.items():
        if f".{module}".endswith(f".{key}"):
            return value
    return default


def _pairs(entries: Mapping[str, Entry], path: Path) -> dict[str, tuple[Entry, Entry]]:
    """Return the entries of A and B by module."""
    found: dict[str, list[Entry | None]] = {}
    for name, entry in entries.items():
        module, place = _parsed(name)
        if place is None or entry.dtype not in FLOATS or len(entry.shape) != 2:
            raise CheckpointError(
                f"{path}: tensor {name!r}: found {entry.dtype} {list(entry.shape)}; "
                f"accepted: matrices {PREFIX}MODULE.lora_A.weight and "
                "lora_B.weight of floating-point numbers"
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
            f"{path}: module {module!r}: found an adapter for it, but this base model "
            f"has no such linear layer; accepted: {', '.join(known) or 'none'} of its "
            f"layers, such as {min(modules, default='none')!r}"
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
