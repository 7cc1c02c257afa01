"""The tensors of a model under the names and in the order of rows of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.gguf.names import GLOBAL_NAMES, LAST_NORM, NUMBER, Family
from inl.convert.gguf_fields import rope_tensors
from inl.convert.gguf_source import SourceTensor
from inl.dtypes import FLOATS, HostArray, wrap
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.executor.model_loader import LanguageModel

TOP_NAMES: Final = {name: ggml for ggml, name in GLOBAL_NAMES.items()}
NOT_STORED: Final = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that follow from the config."""
EXPERT: Final = re.compile(rf"(.*\.experts)\.({NUMBER})\.(\w+)")


def source_tensors(language: LanguageModel, family: Family) -> dict[str, SourceTensor]:
    """Return the tensors of a model by their names in a GGUF file.

    Raises :class:`CheckpointError` for one that has none.
    """
    checkpoint = language.checkpoint
    found: dict[str, SourceTensor] = {
        name: SourceTensor("float32", values.shape, partial(wrap, values))
        for name, values in rope_tensors(language).items()
    }
    experts: dict[str, dict[int, str]] = {}
    for name in checkpoint.names():
        if name.endswith(NOT_STORED) or _is_second_embedding(checkpoint, name):
            continue
        stem, _, kind = name.rpartition(".")
        if match := EXPERT.fullmatch(stem):
            stacked = ggml_name(f"{match[1]}.{match[3]}.{kind}", family, checkpoint)
            experts.setdefault(stacked, {})[int(match[2])] = name
            continue
        found[ggml_name(name, family, checkpoint)] = _tensor(language, family, name)
    for stacked, names in experts.items():
        if sorted(names) != list(range(len(names))):
            raise CheckpointError(
                f"{checkpoint.path}: found experts {sorted(names)} of {stacked}; "
                "accepted: one for each number"
            )
        found[stacked] = _stack(checkpoint, [names[each] for each in sorted(names)])
    return found


def ggml_name(name: str, family: Family, checkpoint: Checkpoint) -> str:
    """Return the name of a tensor in a GGUF file; raises CheckpointError."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        top = TOP_NAMES[stem]
        return f"{family.last_norm if top == LAST_NORM else top}.{kind}"
    modules = {
        module: ggml
        for ggml, module in family.layer_names.items()
        if "{}" not in module
    }
    layer = re.fullmatch(rf"model\.layers\.({NUMBER})\.([\w.]+)", stem)
    if layer is not None and f"{layer[2]}.{kind}" in modules:  # a whole name
        return f"blk.{layer[1]}.{modules[f'{layer[2]}.{kind}']}"
    if layer is None or layer[2] not in modules:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r}: has no name in a GGUF file of "
            f"{family.model_type}; accepted: the tensors of {family.architecture}"
        )
    return f"blk.{layer[1]}.{modules[layer[2]]}.{kind}"


def interleave(array: HostArray, heads: int) -> HostArray:
    """Order rows of q or k for a rotation of adjacent pairs; the inverse of unpermute.

    array: [heads * head_dim, ...] in which lanes ``i`` and ``i + half`` are a pair.
    """
    data = array.data
    pairs = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    ordered = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
    return HostArray(ordered, array.dtype, array.shape)


def _tensor(language: LanguageModel, family: Family, name: str) -> SourceTensor:
    checkpoint = language.checkpoint
    dtype, shape = checkpoint.spec(name)
    change = _change(language, family, name)
    blocks = dtype not in FLOATS
    # Permuted rows and norms are changed as floats; blocks of others stay.
    written = "float32" if change is not None and blocks else dtype
    if change is not None and name.endswith("norm.weight"):
        written = "float32"

    def read() -> HostArray:
        array = checkpoint.tensor(name)
        if change is None:
            return array
        return change(wrap(dequantize(array, name)) if blocks else array)

    return SourceTensor(written, shape, read)


def _change(
    language: LanguageModel, family: Family, name: str
) -> Callable[[HostArray], HostArray] | None:
    module = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": language.config.heads, "k_proj": language.config.kv_heads}
    if family.permuted and module in heads:
        return partial(interleave, heads=heads[module])
    if family.norm_offset and module.endswith("norm"):
        offset = np.float32(family.norm_offset)
        return lambda array: wrap(dequantize(array, name) + offset)
    return None


def _stack(checkpoint: Checkpoint, names: list[str]) -> SourceTensor:
    """Return the matrices of experts as one tensor [E, N, K]."""
    specs = {checkpoint.spec(name) for name in names}
    if len(specs) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: {names[0]!r} and others: found {sorted(specs)}; "
            "accepted: experts of one dtype and shape"
        )
    dtype, shape = specs.pop()

    def read() -> HostArray:
        arrays = [checkpoint.tensor(name).data for name in names]
        return HostArray(np.stack(arrays), dtype, (len(names), *shape))

    return SourceTensor(dtype, (len(names), *shape), read)


def _is_second_embedding(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a head that repeats the embedding it is tied to."""
    if name != "lm_head.weight" or not checkpoint.config.get("tie_word_embeddings"):
        return False
    embedding = "model.embed_tokens.weight"
    head = checkpoint.tensor(name)
    return checkpoint.spec(name) == checkpoint.spec(embedding) and np.array_equal(
        head.data, checkpoint.tensor(embedding).data
    )
