"""Mixtures of experts: routing, products with packed experts, weighted sums."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.dtypes import HostArray
from inl.ops.moe import KINDS, check_routing
from inl.spec.activation_quant import INT8
from inl.spec.kernel import HostGroup, Kernel
from inl.spec.weights import in_layout
from inl.weights.packing import present
from inl_cpu.abi import LANES, Flag
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import CombineExperts, ExpertLinear, Route, SigmoidGate
from inl_cpu.kernels.dense import (
    GATE_FLAGS,
    TILES,
    accepts_activation,
    gate_up,
)
from inl_cpu.matrix import (
    Matrix,
    input_precision,
    packable,
    packing_of,
    requested_inputs,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from inl.spec.op import Spec
    from inl_cpu.command_emitter import CommandEmitter


@in_layout(TILES)
class TiledExperts(NamedTuple):
    """Packed experts: gate and up interleaved or apart, and down."""

    gate_up: tuple[Matrix, ...]
    down: Matrix
    sizes: NDArray[np.int32]
    """[2]: number of experts, and H, the rows of down without padding."""


class ExpertProducts:
    """The op ``experts``, with inputs as precise as batch invariance asks, or not."""

    def __init__(self, emitter: CommandEmitter, *, invariant: bool) -> None:
        self._emitter, self._invariant = emitter, invariant

    def experts(
        self, x: Any, ids: Any, weights: Any, w: TiledExperts, *, activation: str
    ) -> Any:
        emitter, gate = self._emitter, int(GATE_FLAGS[activation])
        x, (tokens, k) = emitter.dense(x), ids.shape
        count, width = w.sizes.tolist()
        ids = _contiguous(emitter, ids)

        def product(x: Any, matrix: Matrix, width: int, flags: int = 0) -> Any:
            return self._product(x, ids, matrix, count, width, flags)

        if len(w.gate_up) == 1:
            hidden = product(x, w.gate_up[0], w.down.columns, gate)
        else:
            hidden, up = (product(x, each, w.down.columns) for each in w.gate_up)
            gate_up(emitter, hidden, up, hidden, gate)
        y = product(hidden, w.down, width)
        return combine_experts(emitter, y.reshape(tokens, k, width), weights)

    def _product(
        self, x: Any, ids: Any, matrix: Matrix, experts: int, width: int, flags: int
    ) -> Any:
        inputs, slots = matrix.inputs, ids.size
        out = self._emitter.new((slots, width))
        self._emitter.emit(
            ExpertLinear(
                slots=slots,
                sharing=slots // max(1, x.shape[0]) or 1,
                experts=experts,
                width=width,
                x_stride=stride(x),
                x=x,
                ids=ids,
                matrix=matrix,
                y=out,
                flags=flags | (inputs.invariant if self._invariant else inputs.default),
            )
        )
        return out


def _contiguous(emitter: CommandEmitter, x: Any) -> Any:
    return x if x.flags.c_contiguous else emitter.copied(x)


def combine_experts(emitter: CommandEmitter, y: Any, weights: Any) -> Any:
    y, weights = _contiguous(emitter, y), _contiguous(emitter, weights)
    rows, slots, width = y.shape
    out = emitter.new((rows, width))
    emitter.emit(
        CombineExperts(
            rows=rows, width=width, slots=slots, y=y, weights=weights, out=out
        )
    )
    return out


def route(
    emitter: CommandEmitter, logits: Any, *, k: int, kind: str, renormalize: bool
) -> tuple[Any, Any]:
    rows, experts = logits.shape
    check_routing(experts, k, kind)
    logits = emitter.dense(logits)
    ids, weights = emitter.new((rows, k), "int32"), emitter.new((rows, k))
    emitter.emit(
        Route(
            rows=rows,
            experts=experts,
            k=k,
            kind=KINDS.index(kind),
            renormalize=int(renormalize),
            x_stride=stride(logits),
            logits=logits,
            ids=ids,
            weights=weights,
        )
    )
    return ids, weights


def sigmoid_gate(emitter: CommandEmitter, x: Any, gate: Any) -> Any:
    x, gate = emitter.dense(x), emitter.dense(gate)
    out = emitter.new(x.shape)
    emitter.emit(
        SigmoidGate(
            rows=x.shape[0],
            width=x.shape[1],
            x_stride=stride(x),
            gate_stride=stride(gate),
            x=x,
            gate=gate,
            y=out,
        )
    )
    return out


def can_pack(**stored: Spec) -> str | None:
    """Refuse experts that are not a stack of matrices each."""
    for name, spec in stored.items():
        if len(spec.shape) != 3 or spec.shape[0] < 1:
            return f"{name} of shape {list(spec.shape)} is not a stack of matrices"
        reason = packable(name, spec.shape[1:], spec.dtype)
        if reason:
            return reason
    return None


def pack_experts(
    emitter: CommandEmitter, group: HostGroup, _backend: Any, dtype: str
) -> TiledExperts:
    gate, up, down = (present(group[name]) for name in ("gate", "up", "down"))
    pairs = [[gate, up]]
    if packing_of(gate, dtype, emitter) != packing_of(up, dtype, emitter):
        pairs = [[gate], [up]]
    return TiledExperts(
        tuple(_stacked(pair, dtype, emitter) for pair in pairs),
        _stacked([down], dtype, emitter),
        np.array(down.shape[:2], np.int32),
    )


def _stacked(
    sources: Sequence[HostArray], dtype: str, emitter: CommandEmitter
) -> Matrix:
    """Pack the experts of one array, or of two in alternating tiles, as one matrix."""
    packing = packing_of(sources[0], dtype, emitter)
    experts, rows, columns = sources[0].shape
    size = len(sources) * LANES * -(-rows // LANES)
    inputs = input_precision(packing, dtype)
    matrix = Matrix(packing, experts * size, columns, inputs, emitter)
    matrix.shape = experts, matrix.shape[0] // experts
    flags = int(Flag.INTERLEAVE) if len(sources) == 2 else 0
    # Experts of a cached matrix are alike: one is compared.
    for expert in range(1 if matrix.from_cache else experts):
        for number, source in enumerate(sources):
            first = expert * size + number * LANES
            matrix.fill(_expert(source, expert), emitter, first=first, flags=flags)
    return matrix


def _expert(source: HostArray, number: int) -> HostArray:
    return HostArray(source.data[number], source.dtype, source.shape[1:])


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Every kernel of mixtures; the products also pack their weights."""
    declared = INT8 if requested_inputs() == "int8" else ""
    for name, invariant in (("native", False), ("native_rows", True)):
        run = ExpertProducts(emitter, invariant=invariant).experts
        yield Kernel(
            "experts",
            name,
            run,
            run_part=run,  # the instruction writes zeros for ids out of range
            refuse=accepts_activation,
            layout=TILES,
            can_pack=can_pack,
            pack=partial(pack_experts, emitter),
            invariant=invariant,
            activation_quant="" if invariant else declared,
            preference=0 if invariant else 1,
        )
    for op in (combine_experts, route, sigmoid_gate):
        yield Kernel(op.__name__, "native", partial(op, emitter), invariant=True)
