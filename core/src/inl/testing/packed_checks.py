"""Promises of kernels that round what packed weights multiply: as coarsely, no more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.dtypes import HostArray
from inl.spec.op import Case
from inl.spec.tolerance import judge
from inl.testing.check import Check, Measure, worst
from inl.testing.kernel_site import Site, passed

if TYPE_CHECKING:
    from inl.spec.op import OpSpec
    from inl.testing.target import Target

SHAPES: Final = {
    "linear": {"weight": (80, 64)},
    "qkv_linear": {"q": (64, 64), "k": (32, 64), "v": (32, 64)},
    "gated_mlp": {"gate": (96, 64), "up": (96, 64), "down": (64, 96)},
}
"""Weights of the cases, by op; other ops hand theirs on to these."""

ATTRS: Final = {"gated_mlp": {"activation": "silu"}}
TOKENS: Final = (1, 5, 33)
"""One, and both sides of where kernels begin to work in larger tiles."""
LARGE: Final = 16.0
"""How far single channels stand out, as in trained models: their groups lose digits."""
UNIT: Final = 2.0**-9
"""Scale of every group: products of it and a code are numbers of any dtype."""


def packed_checks(target: Target, op: OpSpec, dtype: str) -> Iterator[Check]:
    """For ops of which a kernel declares ``inputs``: weights packed as q8_0."""
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
    """A case whose weights lose nothing in q8_0, and these weights packed."""
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
    """``codes`` [N, K] times :data:`UNIT`: a float16 and 32 codes for each group."""
    rows, columns = codes.shape
    groups = codes.reshape(rows, columns // 32, 32)
    scales = np.full((*groups.shape[:2], 1), UNIT, np.float16).view(np.uint8)
    blocks = np.concatenate([scales, groups.view(np.uint8)], -1)
    return HostArray(blocks.reshape(rows, -1), "q8_0", codes.shape)


def _packed(target: Target, op: OpSpec, tokens: int, dtype: str) -> Measure:
    measures = []
    for turn in range(target.rounds):
        rng = target.rng(op.name, "packed", tokens, turn)
        case, packed = packed_case(op, tokens, rng)
        site = Site(target, op, case, dtype, packed)
        kernel = site.choice().kernel
        inputs = kernel.activation_quant if kernel and dtype != "float32" else ""
        found = judge(op, case, dtype, site.run(), inputs)
        note = f"; weights packed, inputs held as {inputs or dtype}"
        measures.append(passed(found, site, target.seed, note))
    return worst(measures)
