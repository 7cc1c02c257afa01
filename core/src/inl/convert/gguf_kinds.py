"""Kinds of GGUF files, and the dtype that each of their tensors is written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inl.checkpoints.blocks.dtypes import BLOCKS
from inl.dtypes import FLOATS

if TYPE_CHECKING:
    from inl.convert.gguf_source import SourceTensor


@dataclass(frozen=True, slots=True)
class GgufKind:
    """Dtypes of the matrices of a file, as llama.cpp's quantizer chooses them."""

    file_type: int
    """Value of ``general.file_type``."""
    matrices: str
    output: str
    """Dtype of the head, and of an embedding that is the head too."""
    more: str = ""
    """Dtype of the values and down projections of some layers; as ``matrices``."""
    fused: str = ""
    """Dtype of fused queries, keys and values; as ``matrices``."""


KINDS: Final = {
    "f32": GgufKind(0, "float32", "float32"),
    "f16": GgufKind(1, "float16", "float16"),
    "bf16": GgufKind(32, "bfloat16", "bfloat16"),
    "q8_0": GgufKind(7, "q8_0", "q8_0"),
    "q6_k": GgufKind(18, "q6_k", "q6_k"),
    "q5_k_m": GgufKind(17, "q5_k", "q6_k", "q6_k", "q6_k"),
    "q4_k_m": GgufKind(15, "q4_k", "q6_k", "q6_k", "q5_k"),
    "q4_0": GgufKind(2, "q4_0", "q6_k"),
}

SMALLER: Final = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Dtypes of matrices whose rows are not a multiple of 256, but of 32."""
PLAIN: Final = ("_norm", "ffn_gate_inp", "ssm_conv1d", "rope_f", "pos_embd")
"""Parts of the names of matrices, and of vectors, that are always in float32."""


def dtypes(
    kind: GgufKind | None,
    tensors: Mapping[str, SourceTensor],
    metadata: Mapping[str, Any],
) -> dict[str, str]:
    """Return the dtype of each tensor of a file; of no kind, as stored."""
    layers = int(metadata.get(f"{metadata['general.architecture']}.block_count", 0))
    tied = "output.weight" not in tensors
    return {
        name: _dtype(kind, name, tensor, layers, tied=tied)
        for name, tensor in tensors.items()
    }


def is_matrix(name: str, tensor: SourceTensor) -> bool:
    """Whether a tensor is a matrix that a kind determines the dtype of."""
    plain = any(part in name for part in PLAIN)
    return len(tensor.shape) > 1 and name.endswith(".weight") and not plain


def _dtype(
    kind: GgufKind | None, name: str, tensor: SourceTensor, layers: int, *, tied: bool
) -> str:
    stored = tensor.dtype
    if not is_matrix(name, tensor):
        return "float32" if stored in FLOATS else stored
    if kind is None:
        return "float32" if stored == "float64" else stored
    return _fitting(_wanted(kind, name, layers, tied=tied), tensor.shape[-1])


def _wanted(kind: GgufKind, name: str, layers: int, *, tied: bool) -> str:
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return kind.output
    if "attn_qkv" in name and kind.fused:
        return kind.fused
    parts = name.split(".")
    sensitive = len(parts) > 2 and parts[2].startswith(("attn_v", "ffn_down"))
    if kind.more and sensitive and gets_more(int(parts[1]), layers):
        return kind.more
    return kind.matrices


def gets_more(layer: int, layers: int) -> bool:
    """Whether a layer is of the first or last eighth, or each third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fitting(dtype: str, columns: int) -> str:
    """Return a dtype whose blocks rows of ``columns`` are a whole number of."""
    while columns % BLOCKS.get(dtype, (1, 1))[0]:
        dtype = SMALLER.get(dtype, "float16")
    return dtype
