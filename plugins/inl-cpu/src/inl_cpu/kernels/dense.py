"""Products with packed weights, and rows of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.dtypes import HostArray, widen
from inl.ops.mlp import ACTIVATIONS
from inl.spec.activation_quant import INT8
from inl.spec.kernel import Kernel, accepts
from inl.spec.op import Spec
from inl.weights.quant import dequantize
from inl_cpu.abi import Flag, Opcode
from inl_cpu.command_emitter import stride
from inl_cpu.matrix import (
    Matrix,
    inputs_asked_for,
    pack_pairs,
    pack_rows,
    packable,
)
from inl_cpu.memory import empty

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from inl_cpu.command_emitter import Stage
    from inl_cpu.memory import Floats

    Group = Mapping[str, HostArray | None]

TILES = "tiles"
"""Layout of all tuples below."""

GATES = {"silu": Flag.GATE_SILU, "gelu_tanh": Flag.GATE_GELU}
assert set(GATES) >= set(ACTIVATIONS)


class TiledLinear(NamedTuple):
    """A matrix and perhaps its bias; an embedding too."""

    matrix: Matrix
    bias: Floats | None = None

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return TILES


class TiledQkv(NamedTuple):
    """Queries, keys and values below each other, or each in a matrix of its own."""

    matrices: tuple[Matrix, ...]
    ends: NDArray[np.int32]
    """[4] rows before each part, and of all."""
    bias: Floats | None = None

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return TILES


class TiledMlp(NamedTuple):
    """Gate and up in turn, or each in a matrix of its own; and down."""

    gate_up: tuple[Matrix, ...]
    down: Matrix

    @property
    def layout(self) -> str:
        """Name of the layout."""
        return TILES


class Products:
    """Products by one way of summing: every row alone, or many rows in tiles."""

    def __init__(self, stage: Stage, flags: Flag) -> None:
        self._stage, self._flags = stage, int(flags)
        self._free = bool(flags & Flag.ANY_BITS)

    def _product(
        self, x: Any, matrix: Matrix, out: Any, bias: Any = None, gate: int = 0
    ) -> None:
        """Multiply ``x`` [T, K] with a matrix into ``out`` [T, N], rows dense."""
        dims = [x.shape[0], stride(x), stride(out), out.shape[1] if gate else 0]
        held = matrix.held.usual if self._free else matrix.held.invariant
        flags = held | gate | self._flags
        self._stage.emit(Opcode.LINEAR, dims, [x, matrix, bias, out], flags=flags)

    def linear(self, x: Any, w: TiledLinear) -> Any:
        stage = self._stage
        flat = stage.dense(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
        out = stage.new((flat.shape[0], w.matrix.rows))
        self._product(flat, w.matrix, out, w.bias)
        return out if x.ndim == 2 else out.reshape(*x.shape[:-1], w.matrix.rows)

    def qkv_linear(self, x: Any, w: TiledQkv) -> tuple[Any, ...]:
        x, ends = self._stage.dense(x), w.ends.tolist()
        out = self._stage.new((x.shape[0], ends[-1]))
        spans = list(pairwise(ends))
        parts = tuple(out[:, start:stop] for start, stop in spans)
        if len(w.matrices) == 1:
            self._product(x, w.matrices[0], out, w.bias)
            return parts
        for matrix, part, (start, stop) in zip(w.matrices, parts, spans, strict=True):
            bias = None if w.bias is None else w.bias[start:stop]
            self._product(x, matrix, part, bias)
        return parts

    def gated_mlp(self, x: Any, w: TiledMlp, *, activation: str) -> Any:
        stage, gate = self._stage, int(GATES[activation])
        x = stage.dense(x)
        hidden = stage.new((x.shape[0], w.down.columns))
        if len(w.gate_up) == 1:
            self._product(x, w.gate_up[0], hidden, gate=gate)
        else:
            up = stage.new(hidden.shape)
            self._product(x, w.gate_up[0], hidden)
            self._product(x, w.gate_up[1], up)
            _gate(stage, hidden, up, hidden, gate)
        out = stage.new((x.shape[0], w.down.rows))
        self._product(hidden, w.down, out)
        return out


def gated_activation(stage: Stage, gate: Any, up: Any, *, activation: str) -> Any:
    shape = gate.shape
    gate, up = (stage.dense(x.reshape(-1, shape[-1])) for x in (gate, up))
    out = stage.new(gate.shape)
    _gate(stage, gate, up, out, int(GATES[activation]))
    return out.reshape(*shape)


def _gate(stage: Stage, gate: Any, up: Any, out: Any, flags: int) -> None:
    dims = [*gate.shape, stride(gate), stride(up), stride(out)]
    stage.emit(Opcode.GATED, dims, [gate, up, out], flags=flags)


def embedding(stage: Stage, tokens: Any, w: TiledLinear) -> Any:
    out = stage.new((tokens.shape[0], w.matrix.columns))
    dims = [tokens.shape[0], w.matrix.columns]
    stage.emit(Opcode.EMBEDDING, dims, [tokens, w.matrix, out], [1.0])
    return out


def knows(*_specs: Any, activation: str) -> str | None:
    """Refuse an activation that the library lacks."""
    return None if activation in GATES else f"the activation {activation!r} is unknown"


def packs(**stored: Spec) -> str | None:
    """Refuse what is no matrix, biases aside."""
    for name, spec in stored.items():
        if name != "bias" and not name.endswith("_bias"):
            reason = packable(name, spec.shape, spec.dtype)
            if reason:
                return reason
    return None


def pack_linear(stage: Stage, group: Group, _backend: Any, dtype: str) -> TiledLinear:
    (matrix,) = pack_rows([present(group["weight"])], dtype, stage)
    return TiledLinear(matrix, held(group.get("bias")))


def pack_qkv(stage: Stage, group: Group, _backend: Any, dtype: str) -> TiledQkv:
    sources = [present(group[name]) for name in "qkv"]
    sizes = [source.shape[0] for source in sources]
    ends = np.cumsum([0, *sizes]).astype(np.int32)
    biases = [held(group.get(f"{name}_bias")) for name in "qkv"]
    bias = None
    if any(part is not None for part in biases):
        bias = empty((int(ends[-1]),))
        for part, start, stop in zip(biases, ends, ends[1:], strict=False):
            bias[start:stop] = 0 if part is None else part
    return TiledQkv(pack_rows(sources, dtype, stage), ends, bias)


def pack_mlp(stage: Stage, group: Group, _backend: Any, dtype: str) -> TiledMlp:
    pair = pack_pairs(present(group["gate"]), present(group["up"]), dtype, stage)
    (down,) = pack_rows([present(group["down"])], dtype, stage)
    return TiledMlp(pair, down)


def present(part: HostArray | None) -> HostArray:
    assert part is not None, "the loader raises for a missing tensor"
    return part


def held(part: HostArray | None) -> Any:
    """A vector as aligned float32, or nothing."""
    if part is None:
        return None
    values = widen(part) if part.dtype != "q8_0" else dequantize(part)
    out = empty(tuple(part.shape))
    np.copyto(out, values, casting="same_kind")
    return out


def kernels(stage: Stage) -> Iterable[Kernel]:
    """The products, each with what packs its weights.

    Tiles of many rows round otherwise than a row alone, so they are not invariant.
    """
    declared = INT8 if inputs_asked_for() == "int8" else ""
    for name, flags in (("native", Flag.ANY_BITS), ("native_rows", Flag.X_EXACT)):
        products = Products(stage, flags)
        alone = flags == Flag.X_EXACT
        for op, prepare in PACKERS.items():
            yield Kernel(
                op,
                name,
                getattr(products, op),
                refuse=knows if op == "gated_mlp" else accepts,
                layout=TILES,
                can_pack=packs,
                pack=partial(prepare, stage),
                invariant=alone,
                activation_quant="" if alone else declared,
                preference=0 if alone else 1,
            )
    rows = partial(embedding, stage)
    pack = partial(pack_linear, stage)
    yield Kernel(
        "embedding", "native", rows, layout=TILES, can_pack=packs, pack=pack,
        invariant=True,
    )  # fmt: skip
    gate = partial(gated_activation, stage)
    yield Kernel("gated_activation", "native", gate, refuse=knows, invariant=True)


PACKERS = {"linear": pack_linear, "qkv_linear": pack_qkv, "gated_mlp": pack_mlp}
