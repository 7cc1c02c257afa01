"""Checks of kernels that quantize the activations which packed weights multiply."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.dtypes import HostArray
from inl.spec.op import Case
from inl.testing.check import Check, Measure, worst
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked

if TYPE_CHECKING:
    from inl.spec.op import OpSpec
    from inl.testing.target import Target

SHAPES: Final = {
    "linear": {"weight": (80, 64)},
    "qkv_linear": {"q": (64, 64), "k": (32, 64), "v": (32, 64)},
    "gated_mlp": {"gate": (96, 64), "up": (96, 64), "down": (64, 96)},
}
"""Weight shapes of the cases, by op; other ops pass their weights to these."""

ATTRS: Final = {"gated_mlp": {"activation": "silu"}}
TOKENS: Final = (1, 5, 33, 130)
"""Decoding, and below and above where kernels switch to larger tiles."""
LARGE: Final = 16.0
"""Scale of outlier channels, as in trained models; they cost precision."""
UNIT: Final = 2.0**-9
"""Scale of every group: its product with a code is exact in every dtype."""


def packed_checks(target: Target, op: OpSpec, dtype: str) -> Iterator[Check]:
    """Check ops with an ``activation_quant`` kernel on weights packed as q8_0."""
    declared = any(
        k.activation_quant for k in target.selection.kernels if k.op == op.name
    )
    if not declared or op.name not in SHAPES:
        return
    for tokens in TOKENS:
        run = partial(_packed, target, op, tokens, dtype)
        yield Check("kernel", f"{op.name}/packed/{tokens}/{dtype}", run)


def packed_case(
    op: OpSpec, tokens: int, rng: np.random.Generator
) -> tuple[Case, dict[str, HostArray]]:
    """Return a case whose weights are exact in q8_0, and the packed weights."""
    shapes: dict[str, tuple[int, int]] = SHAPES[op.name]
    codes = {
        name: rng.integers(-127, 128, shape, np.int8) for name, shape in shapes.items()
    }
    weights: Any = op.weights
    w = weights(**{name: UNIT * array for name, array in codes.items()})
    width = next(iter(shapes.values()))[1]
    x = rng.standard_normal((tokens, width))
    x[:, ::48] *= LARGE
    case = Case(f"packed/{tokens}", (x, w), ATTRS.get(op.name, {}))
    return case, {name: q8_0(array) for name, array in codes.items()}


def q8_0(codes: np.ndarray[Any, np.dtype[np.int8]]) -> HostArray:
    """Pack ``codes`` [N, K] times :data:`UNIT` as q8_0.

    Each group is a float16 scale and 32 int8 codes.
    """
    rows, columns = codes.shape
    groups = codes.reshape(rows, columns // 32, 32)
    scales = np.full((*groups.shape[:2], 1), UNIT, np.float16).view(np.uint8)
    blocks = np.concatenate([scales, groups.view(np.uint8)], -1)
    return HostArray(blocks.reshape(rows, -1), "q8_0", codes.shape)


def _packed(target: Target, op: OpSpec, tokens: int, dtype: str) -> Measure:
    measures = []
    for seed in range(target.rounds):
        rng = target.rng(op.name, "packed", tokens, seed)
        case, packed = packed_case(op, tokens, rng)
        op_call = OpCall(target, op, case, dtype, packed)
        kernel = op_call.choice().kernel
        quant = kernel.activation_quant if kernel and dtype != "float32" else ""
        note = f"; weights packed, activations in {quant or dtype}"
        result = run_checked(op_call, target.seed, note)
        verdict = judged(op_call, case, result, quant)
        measures.append(require_passed(verdict, op_call, target.seed, note))
    return worst(measures)
