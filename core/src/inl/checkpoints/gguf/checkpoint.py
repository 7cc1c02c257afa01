"""Checkpoint of one GGUF file, with the names of the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import Entry, show
from inl.checkpoints.gguf.config import DRAFT_LAYERS, config
from inl.checkpoints.gguf.file import GgufFile
from inl.checkpoints.gguf.names import (
    DRAFT_NAMES,
    Family,
    architecture,
    family,
    hf_name,
)
from inl.checkpoints.gguf.rope import (
    LONG_FACTORS,
    ROPE_FACTORS,
    long_rope_config,
    partial_rope_config,
    rope_config,
)
from inl.checkpoints.gguf.special_tokens import special_tokens
from inl.checkpoints.sampling import gguf_sampling
from inl.dtypes import SIZES, HostArray, widen, wrap
from inl.errors import CheckpointError, TokenizerNotFound

if TYPE_CHECKING:
    from inl.backend.weight_cache import FileIdentity
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

HEADS: Final = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Config field with the number of heads of each permuted projection."""
RATES: Final = ".A_log"
VECTORS: Final = (RATES, ".D", ".mamba.norm.weight", ".mixer.norm.weight")
"""Ends of the names of vectors that files of Mamba-2 divide into rows."""
FACTOR, INPUT_FACTOR = ".scale", ".input_scale"
"""Ends of the names of factors beside matrices of NVFP4, and of their inputs."""


@final
class GgufCheckpoint(Checkpoint):
    """Checkpoint of a GGUF file; tensors keep their quantization.

    Only family-specific transformations are reverted: the row order of q and k, and
    an offset of norm weights. folder: the model's folder, if the file was found in it;
    see :func:`inl.checkpoints.files.tensor_file.resolve`.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        self._gguf = GgufFile(path, folder)
        metadata = self._gguf.metadata
        known = family(metadata, architecture(metadata, path))
        self.config = config(metadata, self._gguf.tensors, path)
        if known and ROPE_FACTORS in self._gguf.tensors:
            factors = self._gguf.tensors.pop(ROPE_FACTORS)
            by_kind = "global_head_dim" in self.config
            read = partial_rope_config if by_kind else rope_config
            self.config |= read(self._gguf.file, factors, self.config)
        if known and LONG_FACTORS["short_factor"] in self._gguf.tensors:
            self.config |= long_rope_config(
                self._gguf.file, self._long_factors(), self.config
            )
        self.generation_config = gguf_sampling(metadata)
        self.eos_token_ids = tuple(self.config["eos_token_id"])
        self.special_tokens = special_tokens(metadata, path)
        self._family = known
        used = self._used_tensors()
        stems = {each.removesuffix(FACTOR) for each in used if each.endswith(FACTOR)}
        stems &= {
            each.removesuffix(".weight")
            for each in used
            if self._gguf.tensors[each].dtype == "nvfp4"
        }
        unread = {f"{stem}{end}" for stem in stems for end in (FACTOR, INPUT_FACTOR)}
        used = [each for each in used if each not in unread]
        self._factors = {
            _name(f"{stem}.weight", known): f"{stem}{FACTOR}" for stem in stems
        }
        self._stored = {_name(name, known): name for name in used}
        layers = self.config.get("num_hidden_layers", 0)
        self._made = activations(metadata, layers, path) if known else {}
        if len(self._stored) != len(used):
            duplicates = set(used) - set(self._stored.values())
            raise CheckpointError(
                f"{path}: tensors: found {show(sorted(duplicates))} again under "
                "another name; accepted: each once"
            )

    def _long_factors(self) -> dict[str, Entry]:
        tensors = self._gguf.tensors
        return {
            field: tensors.pop(name)
            for field, name in LONG_FACTORS.items()
            if name in tensors
        }

    def _used_tensors(self) -> list[str]:
        """Return the names of all tensors but those of layers that are not read."""
        metadata = self._gguf.metadata
        name, known = metadata.get("general.architecture"), self._family
        drafts = metadata.get(f"{name}.{DRAFT_LAYERS}")
        if (
            not drafts
            or known is None
            or DRAFT_NAMES.keys() <= known.layer_names.keys()
        ):
            return list(self._gguf.tensors)
        count = metadata[f"{name}.block_count"]
        layers = range(self.config["num_hidden_layers"], count)
        drafting = tuple(f"blk.{layer}." for layer in layers)
        return [each for each in self._gguf.tensors if not each.startswith(drafting)]

    @property
    def fields(self) -> Mapping[str, Any]:
        """The metadata of the file."""
        return self._gguf.metadata

    def names(self) -> list[str]:
        return [*self._stored, *self._made]

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self._made:
            return "float32", self._made[name].shape
        if name not in self._stored:
            raise self.missing(name)
        entry = self._gguf.tensors[self._stored[name]]
        dtype = "float32" if name in self._factors else entry.dtype
        return dtype, _shape(name, entry.shape)

    def tensor(self, name: str) -> HostArray:
        self.spec(name)
        if name in self._made:
            return self._made[name]
        file, entry = self._gguf.file, self._gguf.tensors[self._stored[name]]
        array = file.array(entry) if entry.dtype in SIZES else file.rows(entry)
        restore = self._restoration(name)
        array = restore(array) if restore else array
        return self._scaled(name, array) if name in self._factors else array

    def _scaled(self, name: str, array: HostArray) -> HostArray:
        """Decode a matrix, or several, and multiply by the factor of each."""
        file, entry = self._gguf.file, self._gguf.tensors[self._factors[name]]
        factors = widen(file.array(entry)).astype(np.float32).reshape(-1)
        accepted = {1, array.shape[0]} if len(array.shape) == 3 else {1}
        if factors.size not in accepted or not np.isfinite(factors).all():
            raise CheckpointError(
                f"{self.path}: tensor {self._factors[name]!r}: found "
                f"{entry.dtype}{list(entry.shape)} for {list(array.shape)}; accepted: "
                "a finite factor of each matrix"
            )
        values = dequantize(array, name)
        values *= factors.reshape(-1, *(1,) * (values.ndim - 1))
        return wrap(values)

    def row_reader(self, name: str) -> Callable[[int, memoryview], None] | None:
        dtype, shape = self.spec(name)
        if name in self._made or dtype in SIZES or self._restoration(name):
            return None  # as those with a factor, which are float32
        file, entry = self._gguf.file, self._gguf.tensors[self._stored[name]]
        size = (entry.stop - entry.start) // shape[0]

        def read(row: int, target: memoryview) -> None:
            file.read_into(target, entry.start + row * size)

        return read

    def files(self) -> Sequence[Path]:
        return (self.path,)

    def identities(self) -> Mapping[Path, FileIdentity]:
        return {self.path: self._gguf.file.identity}

    def _restoration(self, name: str) -> Callable[[HostArray], HostArray] | None:
        """Return what reverts the transformation of a tensor, ``None`` without one."""
        family, where = self._family, self._where(name)
        if family is None:
            return None
        stored = self._gguf.tensors[self._stored[name]].shape
        shape = _shape(name, stored)
        module = name.rpartition(".")[0].rpartition(".")[2]
        is_inner = name.endswith("linear_attn.norm.weight")
        if family.permuted and module in HEADS:
            return lambda x: unpermute(x, self.config[HEADS[module]], where)
        if name.endswith(RATES):
            return lambda x: wrap(rates(widen(x), where).reshape(shape))
        if shape != stored:
            return lambda x: HostArray(x.data.reshape(shape), x.dtype, shape)
        if family.norm_offset and module.endswith("norm") and not is_inner:
            offset = np.float32(family.norm_offset)
            return lambda x: wrap(widen(x).astype(np.float32) - offset)
        return None

    def tokenizer(self) -> Tokenizer:
        from inl.text.gguf_vocabulary import open_tokenizer

        if not any(name.startswith("tokenizer.ggml.") for name in self._gguf.metadata):
            raise TokenizerNotFound(
                f"{self.path}: tokenizer.ggml.model: not found; accepted: a file with "
                "a vocabulary"
            )
        return open_tokenizer(self._gguf.metadata, str(self.path))

    @property
    def chat_template(self) -> ChatTemplate | None:
        from inl.text.template import ChatTemplate

        def template(key: str, tool_use: ChatTemplate | None) -> ChatTemplate | None:
            source, where = self._gguf.metadata.get(key), f"{self.path}: {key}"
            if source is None:
                return None
            if not isinstance(source, str):
                raise CheckpointError(
                    f"{where}: found {show(source)}; accepted: a string"
                )
            return ChatTemplate(
                source,
                where=where,
                special_tokens=self.special_tokens,
                tool_use=tool_use,
            )

        key = "tokenizer.chat_template"
        return template(key, template(f"{key}.tool_use", None))

    def close(self) -> None:
        self._gguf.file.close()

    def _where(self, name: str) -> str:
        return f"{self.path}: tensor {self._stored[name]!r}"


def _name(name: str, known: Family | None) -> str:
    """Return the Hugging Face name of a tensor of a known family."""
    if known is None:
        return name
    return hf_name(name, known.layer_names, last_norm=known.last_norm)


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in the Hugging Face layout: GGUF files leave out axes of 1."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return 1, shape[0]
    if name.endswith(VECTORS) and len(shape) == 2:
        return (shape[0] * shape[1],)
    return shape


def activations(
    metadata: Mapping[str, Any], layers: int, where: Path
) -> dict[str, HostArray]:
    """Return the parameters of xIELU of each layer, which are metadata in files.

    By the names of tensors of Apertus. Raises :class:`CheckpointError` for lists of
    another length than the number of layers.
    """
    made: dict[str, HostArray] = {}
    for part in ("alpha_p", "alpha_n", "beta"):
        if (found := metadata.get(f"xielu.{part}")) is None:
            continue
        values = np.asarray(found, np.float32).reshape(-1)
        values = np.repeat(values, layers) if values.size == 1 else values
        if values.size != layers or not np.isfinite(values).all():
            raise CheckpointError(
                f"{where}: xielu.{part}: found {show(values.tolist())}; accepted: "
                f"{layers} finite numbers, one a layer"
            )
        made |= {
            f"model.layers.{index}.mlp.act_fn.{part}": wrap(values[index : index + 1])
            for index in range(layers)
        }
    return made


def rates(decay: NDArray[Any], where: str) -> NDArray[np.float32]:
    """Return the logarithms of rates, of which GGUF files have the negative numbers."""
    if not (decay < 0).all():
        raise CheckpointError(
            f"{where}: found a largest number of {decay.max():g}; accepted: numbers "
            "below 0"
        )
    return np.log(-decay.astype(np.float64)).astype(np.float32)


def unpermute(array: HostArray, heads: int, where: str) -> HostArray:
    """Restore the row order of q or k for a rotation of pairs ``(i, i + half)``.

    GGUF files of some families order rows for pairs ``(2i, 2i + 1)``. array:
    [heads * head_dim, ...] of any dtype; rows are moved without decoding.
    """
    rows = array.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(
            f"{where}: shape: found {list(array.shape)} for {heads} heads; "
            f"accepted: rows in multiples of {2 * heads}"
        )
    rest = array.data.shape[1:]
    pairs = array.data.reshape(heads, rows // (2 * heads), 2, *rest)
    ordered = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.data.shape)
    return HostArray(ordered, array.dtype, array.shape)
