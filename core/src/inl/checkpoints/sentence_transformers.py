"""Reads how sentence-transformers pools a model: ``modules.json`` and its folders."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.files.json_text import parse_json, read_json
from inl.checkpoints.files.tensor_file import read_bytes, show
from inl.dtypes import widen
from inl.errors import CheckpointError, RequestError
from inl.spec.encoder import Pooling

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODULES: Final = "modules.json"
PROMPTS: Final = "config_sentence_transformers.json"
MAX_MODULES: Final = 1 << 16
"""Largest size of the file, in bytes."""
KINDS: Final = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Flags of a pooling module, and the kind of each."""
ACTIVATIONS: Final = {"Identity": "identity", "Tanh": "tanh"}
"""Classes of torch that a product names, and what they compute."""
NAMES: Final = {"cls": "first", "mean": "mean", "lasttoken": "last"}
"""Values of the later field ``pooling_mode``."""


class DenseModule(NamedTuple):
    """A product after the pooling."""

    weight: NDArray[np.float32]
    """[K, H]."""
    bias: NDArray[np.float32] | None
    """[K]."""
    activation: str
    """"identity" or "tanh"."""

    def apply(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return rows [n, K] of rows [n, H], in float32."""
        found = rows @ self.weight.T
        if self.bias is not None:
            found = found + self.bias
        return np.tanh(found) if self.activation == "tanh" else found


class PoolingModules(NamedTuple):
    """What follows the hidden states of a model."""

    pooling: Pooling
    """On the device."""
    dense: tuple[Path, ...] = ()
    """Folders of :class:`DenseModule`, applied in this order to its results."""
    unit: bool = False
    """Whether the results of ``dense`` are scaled to length 1."""

    def read_dense(self) -> tuple[DenseModule, ...]:
        """Read the products; raises :class:`CheckpointError`."""
        return tuple(map(_dense, self.dense))


def read_pooling(path: Path, default: Pooling) -> Pooling:
    """Return how the model in a folder is pooled; ``default`` without ``modules.json``.

    Raises :class:`CheckpointError` for modules and ways of pooling that are not known.
    """
    return read_modules(path, default).pooling


def read_modules(path: Path, default: Pooling) -> PoolingModules:
    """Return what follows the hidden states of the model in a folder.

    ``default`` without ``modules.json``. Raises as :func:`read_pooling`.
    """
    file = path / MODULES
    if not file.is_file():
        return PoolingModules(default)
    # The reader accepts objects, and the file has a list.
    text = b'{"modules":' + read_bytes(file, MAX_MODULES, path) + b"}"
    modules = parse_json(text, str(file))["modules"]
    if not isinstance(modules, list):
        raise CheckpointError(f"{file}: found {show(modules)}, expected a list")
    kind, unit = default.kind, False
    dense: list[Path] = []
    for module in modules:
        given = module if isinstance(module, Mapping) else {}
        name = str(given.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(path / str(given.get("path", "")) / "config.json")
        elif name == "Dense" and not unit:
            dense.append(path / str(given.get("path", "")))
        elif name == "Normalize":
            unit = True
        elif name != "Transformer":
            raise CheckpointError(
                f"{file}: found a module {show(given.get('type'))}, accepted: "
                "Transformer, Pooling, Dense and Normalize, in this order"
            )
    return PoolingModules(Pooling(kind, unit and not dense), tuple(dense), unit)


class Prompts(NamedTuple):
    """Texts before those that a model embeds."""

    texts: Mapping[str, str] = {}
    """Name -> text."""
    default: str | None = None
    """Name of the one that texts have unless another is chosen."""

    def text(self, name: str | None) -> str:
        """Return the prompt of a name, or the default; raises :class:`RequestError`."""
        name = self.default if name is None else name
        if name is None:
            return ""
        if name not in self.texts:
            known = ", ".join(map(repr, self.texts)) or "none"
            raise RequestError(f"prompt_name: found {name!r:.80}, accepted: {known}")
        return self.texts[name]


def read_prompts(path: Path) -> Prompts:
    """Return the prompts of a model's folder; raises :class:`CheckpointError`."""
    file = path / PROMPTS
    if not file.is_file():
        return Prompts()
    fields = read_json(file)
    texts, name = fields.get("prompts") or {}, fields.get("default_prompt_name")
    valid = isinstance(texts, Mapping) and all(
        isinstance(text, str) for text in texts.values()
    )
    if not valid or not (name is None or name in texts):
        raise CheckpointError(
            f"{file}: found prompts {show(texts)} and the default {show(name)}, "
            "expected texts by name, and one of the names"
        )
    return Prompts(dict(texts), name)


def _dense(folder: Path) -> DenseModule:
    fields = read_json(folder / "config.json")
    name = str(fields.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{folder}: found activation_function {name!r:.80}, accepted: "
            f"{', '.join(ACTIVATIONS)} of torch"
        )
    with closing(open_checkpoint(folder)) as stored:
        tensors = {
            each: np.asarray(widen(stored.tensor(f"linear.{each}")), np.float32)
            for each in ("weight", "bias")
            if each == "weight" or f"linear.{each}" in stored.names()
        }
    weight, bias = tensors["weight"], tensors.get("bias")
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise CheckpointError(
            f"{folder}: found linear.weight {list(weight.shape)}, expected [out, in], "
            "and linear.bias [out] or none"
        )
    return DenseModule(weight, bias, ACTIVATIONS[name])


def _kind(file: Path) -> str:
    fields: Any = read_json(file)
    fields = fields if isinstance(fields, Mapping) else {}
    named = fields.get("pooling_mode")
    if named is not None:
        chosen = [NAMES[named]] if named in NAMES else []
    else:
        flags = [name for name, on in fields.items() if on is True
                 and name.startswith("pooling_mode_")]  # fmt: skip
        chosen = [KINDS[name] for name in flags if name in KINDS]
        chosen = chosen if len(flags) == len(chosen) else []
    if len(chosen) != 1:
        raise CheckpointError(
            f"{file}: found pooling {show(dict(fields))}, accepted: one of "
            f"{', '.join(KINDS)}"
        )
    return chosen[0]
