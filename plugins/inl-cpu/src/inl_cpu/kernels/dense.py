"""Products with packed weights, and embedding lookup."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.blocks.dtypes import dequantize
from inl.dtypes import HostArray, widen
from inl.ops.linear import Linear as LinearWeights
from inl.ops.mlp import ACTIVATIONS
from inl.spec.activation_quant import INT8
from inl.spec.kernel import HostGroup, Kernel, accepts
from inl.spec.op import Spec
from inl.spec.weights import in_layout
from inl.weights.packing import present
from inl_cpu.abi import Flag
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Embedding, Gated, Linear
from inl_cpu.matrix import (
    REQUANTIZED_SIZE,
    Matrix,
    pack_pairs,
    pack_rows,
    packable,
    requested_inputs,
)
from inl_cpu.memory import empty

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from inl_cpu.command_emitter import CommandEmitter
    from inl_cpu.memory import Floats


TILES = "tiles"
"""Layout of the packed weights below."""

GATE_FLAGS = {"silu": Flag.GATE_SILU, "gelu_tanh": Flag.GATE_GELU}
assert set(GATE_FLAGS) >= set(ACTIVATIONS)


TiledLinear = in_layout(TILES)(LinearWeights)
"""Packed weights of a linear layer or an embedding; ``weight`` is a ``Matrix``."""


@in_layout(TILES)
class TiledQkv(NamedTuple):
    """Packed query, key and value weights: one stacked matrix, or three."""

    matrices: tuple[Matrix, ...]
    ends: NDArray[np.int32]
    """[4]: first row of q, k and v, and the number of all rows."""
    bias: Floats | None = None


@in_layout(TILES)
class TiledMlp(NamedTuple):
    """Packed weights of a gated MLP: gate and up interleaved or apart, and down."""

    gate_up: tuple[Matrix, ...]
    down: Matrix


class Products:
    """Product kernels, batch-invariant or with faster tiles of many rows."""

    def __init__(self, emitter: CommandEmitter, flags: Flag) -> None:
        self._emitter, self._flags = emitter, int(flags)
        self._variant = bool(flags & Flag.BATCH_VARIANT)

    def product(
        self, x: Any, matrix: Matrix, out: Any, bias: Any = None, gate: int = 0
    ) -> None:
        """Multiply ``x`` [T, K] with a matrix into ``out`` [T, N]; rows contiguous."""
        inputs = matrix.inputs
        precision = inputs.default if self._variant else inputs.invariant
        if self._variant and matrix.requantizes:
            precision |= Flag.REQUANTIZE
        self._emitter.emit(
            Linear(
                rows=x.shape[0],
                x_stride=stride(x),
                y_stride=stride(out),
                gated_columns=out.shape[1] if gate else 0,
                x=x,
                matrix=matrix,
                bias=bias,
                y=out,
                flags=precision | gate | self._flags,
            )
        )

    def linear(self, x: Any, w: LinearWeights) -> Any:
        emitter = self._emitter
        flat = emitter.dense(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
        out = emitter.new((flat.shape[0], w.weight.rows))
        self.product(flat, w.weight, out, w.bias)
        return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w.weight.rows)

    def qkv_linear(self, x: Any, w: TiledQkv) -> tuple[Any, ...]:
        x, ends = self._emitter.dense(x), w.ends.tolist()
        out = self._emitter.new((x.shape[0], ends[-1]))
        spans = list(pairwise(ends))
        parts = tuple(out[:, start:stop] for start, stop in spans)
        if len(w.matrices) == 1:
            self.product(x, w.matrices[0], out, w.bias)
            return parts
        for matrix, part, (start, stop) in zip(w.matrices, parts, spans, strict=True):
            bias = None if w.bias is None else w.bias[start:stop]
            self.product(x, matrix, part, bias)
        return parts

    def gated_mlp(self, x: Any, w: TiledMlp, *, activation: str) -> Any:
        emitter, gate = self._emitter, int(GATE_FLAGS[activation])
        x = emitter.dense(x)
        hidden = emitter.new((x.shape[0], w.down.columns))
        if len(w.gate_up) == 1:
            self.product(x, w.gate_up[0], hidden, gate=gate)
        else:
            up = emitter.new(hidden.shape)
            self.product(x, w.gate_up[0], hidden)
            self.product(x, w.gate_up[1], up)
            gate_up(emitter, hidden, up, hidden, gate)
        out = emitter.new((x.shape[0], w.down.rows))
        self.product(hidden, w.down, out)
        return out


def gated_activation(
    emitter: CommandEmitter, gate: Any, up: Any, *, activation: str
) -> Any:
    shape = gate.shape
    gate, up = (emitter.dense(x.reshape(-1, shape[-1])) for x in (gate, up))
    out = emitter.new(gate.shape)
    gate_up(emitter, gate, up, out, int(GATE_FLAGS[activation]))
    return out.reshape(*shape)


def gate_up(emitter: CommandEmitter, gate: Any, up: Any, out: Any, flags: int) -> None:
    """Write activation(gate) * up; flags: that of the activation."""
    rows, width = gate.shape
    emitter.emit(
        Gated(
            rows=rows,
            width=width,
            gate_stride=stride(gate),
            up_stride=stride(up),
            y_stride=stride(out),
            gate=gate,
            up=up,
            y=out,
            flags=flags,
        )
    )


def embedding(emitter: CommandEmitter, tokens: Any, w: LinearWeights) -> Any:
    count, width = tokens.shape[0], w.weight.columns
    out = emitter.new((count, width))
    emitter.emit(
        Embedding(tokens=count, y_stride=width, ids=tokens, matrix=w.weight, y=out)
    )
    return out


def accepts_activation(*_specs: Any, activation: str) -> str | None:
    """Refuse an activation that the library lacks."""
    if activation in GATE_FLAGS:
        return None
    return f"the activation {activation!r} is not supported"


def can_pack(**stored: Spec) -> str | None:
    """Refuse weights that are not matrices; biases are exempt."""
    for name, spec in stored.items():
        if name != "bias" and not name.endswith("_bias"):
            reason = packable(name, spec.shape, spec.dtype)
            if reason:
                return reason
    return None


def pack_linear(
    emitter: CommandEmitter, group: HostGroup, _backend: Any, dtype: str
) -> LinearWeights:
    (matrix,) = pack_rows([present(group["weight"])], dtype, emitter)
    return TiledLinear(matrix, float_vector(group.get("bias")))


def pack_qkv(
    emitter: CommandEmitter, group: HostGroup, _backend: Any, dtype: str
) -> TiledQkv:
    sources = [present(group[name]) for name in "qkv"]
    sizes = [source.shape[0] for source in sources]
    ends = np.cumsum([0, *sizes]).astype(np.int32)
    biases = [float_vector(group.get(f"{name}_bias")) for name in "qkv"]
    bias = None
    if any(part is not None for part in biases):
        bias = empty((int(ends[-1]),))
        for part, start, stop in zip(biases, ends, ends[1:], strict=False):
            bias[start:stop] = 0 if part is None else part
    return TiledQkv(pack_rows(sources, dtype, emitter), ends, bias)


def pack_mlp(
    emitter: CommandEmitter, group: HostGroup, _backend: Any, dtype: str
) -> TiledMlp:
    gate, up = present(group["gate"]), present(group["up"])
    pair = pack_pairs(gate, up, dtype, emitter)
    (down,) = pack_rows([present(group["down"])], dtype, emitter)
    return TiledMlp(pair, down)


def float_vector(part: HostArray | None) -> Any:
    """Convert a vector to aligned float32; ``None`` stays ``None``."""
    if part is None:
        return None
    values = widen(part) if part.dtype != "q8_0" else dequantize(part)
    out = empty(tuple(part.shape))
    np.copyto(out, values, casting="same_kind")
    return out


REQUANTIZED: Final = (
    "in steps of 64 tokens or more, weights of up to 6 bits in matrices of at least "
    f"{REQUANTIZED_SIZE} x {REQUANTIZED_SIZE} are rounded to int8 with a scale for 64 "
    "columns, and inputs with one for 256; not with INL_CPU_INPUTS=int16 or the "
    "invariant mode"
)

PACKERS = {"linear": pack_linear, "qkv_linear": pack_qkv, "gated_mlp": pack_mlp}


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """The products, each with the function that packs its weights.

    AMX and AVX-512 round many rows otherwise than a single one, so that variant is not
    batch-invariant.
    """
    declared = INT8 if requested_inputs() == "int8" else ""
    requantizes = bool(declared) and emitter.machine.isa == "avx512"
    for name, flags in (("native", Flag.BATCH_VARIANT), ("native_rows", Flag.X_EXACT)):
        products = Products(emitter, flags)
        invariant = flags == Flag.X_EXACT
        for op, pack in PACKERS.items():
            yield Kernel(
                op,
                name,
                getattr(products, op),
                refuse=accepts_activation if op == "gated_mlp" else accepts,
                layout=TILES,
                can_pack=can_pack,
                pack=partial(pack, emitter),
                invariant=invariant,
                activation_quant="" if invariant else declared,
                note=REQUANTIZED if requantizes and not invariant else "",
                preference=0 if invariant else 1,
            )
    yield Kernel(
        "embedding",
        "native",
        partial(embedding, emitter),
        layout=TILES,
        can_pack=can_pack,
        pack=partial(pack_linear, emitter),
        invariant=True,
    )
    gate = partial(gated_activation, emitter)
    yield Kernel(
        "gated_activation", "native", gate, refuse=accepts_activation, invariant=True
    )
