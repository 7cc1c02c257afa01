"""bitsandbytes (Dettmers et al., 2023): NF4 and FP4 by a table, int8 by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np

from inl.bounded_json import parse_json
from inl.checkpoints.quantized.matrix import QuantMatrix
from inl.checkpoints.quantized.matrix_format import MatrixFormat, Parts, Shape, option

BLOCKS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE: Final = 1 << 16
"""Size limit of the JSON text of a quantization state in bytes."""


@final
class Bnb4(MatrixFormat):
    """Codes of 4 bits, the first in the high half of a byte, in blocks along rows."""

    marker = ".weight.absmax"

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = option(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self.name = f"bitsandbytes {kind.upper()}"
        self._state = f"weight.quant_state.bitsandbytes__{kind}"
        self.parts = (
            "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
            "weight.nested_quant_map", self._state,
        )  # fmt: skip

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        state = self._read_state(parts)
        rows, size = state["shape"]
        parts.check("weight", (-(-rows * size // 2), 1), dtypes=("uint8",))
        blocks = -(-rows * size // state["blocksize"])
        parts.check("weight.absmax", (blocks,), dtypes=("float32", "uint8"))
        parts.check("weight.quant_map", (16,), dtypes=("float32",))
        if parts.dtype("weight.absmax") == "uint8":
            nested = -(-blocks // state["nested_blocksize"])
            parts.check("weight.nested_absmax", (nested,), dtypes=("float32",))
            parts.check("weight.nested_quant_map", (256,), dtypes=("float32",))
        return "float32", (rows, size)

    def matrix(self, parts: Parts) -> QuantMatrix:
        state = self._read_state(parts)
        rows, size = state["shape"]
        data = parts.integers("weight").reshape(-1)
        codes = np.stack([data >> 4, data & 15], 1).reshape(-1)[: rows * size]
        values = parts.floats("weight.quant_map")[codes]
        scales = self._scales(parts, state)
        # Blocks run over row ends: every code gets the scale of its block.
        values *= np.repeat(scales, state["blocksize"])[: rows * size]
        one = np.ones((1, 1), np.float32)
        return QuantMatrix(values.reshape(rows, size), one, None, rows, None, size)

    def _scales(self, parts: Parts, state: Mapping[str, Any]) -> Any:
        if parts.dtype("weight.absmax") != "uint8":
            return parts.floats("weight.absmax")
        codes = parts.integers("weight.absmax")
        scales = parts.floats("weight.nested_quant_map")[codes]
        nested = parts.floats("weight.nested_absmax")
        scales *= np.repeat(nested, state["nested_blocksize"])[: len(scales)]
        return scales + np.float32(state["nested_offset"])

    def _read_state(self, parts: Parts) -> dict[str, Any]:
        """Return the sizes in the JSON text that is stored as a tensor."""
        if (
            len(parts.shape(self._state)) != 1
            or parts.shape(self._state)[0] > MAX_STATE
        ):
            parts.refuse(self._state, str(parts.shape(self._state)), "a short text")
        text = bytes(parts.integers(self._state).astype(np.uint8))
        try:
            state = parse_json(text, self._state)
            shape = [int(one) for one in state["shape"]]
            found = {
                "shape": shape,
                "blocksize": int(state["blocksize"]),
                "nested_blocksize": int(state.get("nested_blocksize") or 256),
                "nested_offset": float(state.get("nested_offset") or 0.0),
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            parts.refuse(self._state, f"{text[:60]!r}", "a JSON object with shape")
        valid = len(shape) == 2 and min(shape) > 0
        if not valid or not {found["blocksize"], found["nested_blocksize"]} <= {
            *BLOCKS
        }:
            parts.refuse(self._state, f"{text[:60]!r}", f"blocks of {BLOCKS}")
        return found


@final
class Bnb8(MatrixFormat):
    """Signed bytes with the largest magnitude of each row."""

    name = "bitsandbytes int8"
    marker = ".SCB"
    parts = ("weight", "SCB", "weight_format")

    def __init__(self, _config: Mapping[str, Any]) -> None: ...

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        shape = parts.shape("weight")
        if len(shape) != 2:
            parts.refuse("weight", f"shape {list(shape)}", "2 axes")
        parts.check("weight", shape, dtypes=("int8",))
        parts.check("SCB", shape[:1], dtypes=("float32",))
        return parts.blocks("q8_0", "SCB", shape[1], shape[1]), shape

    def matrix(self, parts: Parts) -> QuantMatrix:
        codes = parts.integers("weight")
        scale = (parts.floats("SCB") / 127).reshape(-1, 1).astype(np.float32)
        return QuantMatrix(codes, scale, None, 1, None, codes.shape[1])


def bitsandbytes(config: Mapping[str, Any]) -> MatrixFormat:
    """Return the format of 4 or 8 bits; raises :class:`CheckpointError`."""
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return Bnb4(config)
    return Bnb8(config)
