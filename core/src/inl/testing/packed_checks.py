"""Checks of kernels that take packed weights: each dtype of blocks, and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from inl.checkpoints.blocks.codes import FLOAT8_BLOCKS, FLOAT8_SCALED
from inl.checkpoints.blocks.dtypes import BLOCK_DTYPES, BLOCKS, dequantize
from inl.dtypes import HostArray
from inl.spec.kernel import PLAIN
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


KIND_SHAPES: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "linear": {"weight": (80, 512)},
    "qkv_linear": {"q": (64, 256), "k": (32, 256), "v": (32, 256)},
    "gated_mlp": {"gate": (256, 256), "up": (256, 256), "down": (256, 256)},
    "embedding": {"weight": (48, 256)},
    "experts": {"gate": (3, 256, 256), "up": (3, 256, 256), "down": (3, 256, 256)},
}
"""Weight shapes of the cases of each dtype of blocks: of whole blocks of 256."""
KIND_DTYPE: Final = "float32"
"""It holds the numbers of blocks nearly exactly; half types would round them first."""
KIND_TOKENS: Final = (1, 19)
POOL: Final = 2048
"""Blocks that are drawn to find normal ones."""
NORMAL: Final = 0.05, 4.0
"""Largest magnitude of a block of a case, from and to."""


def kind_checks(target: Target, op: OpSpec) -> Iterator[Check]:
    """Check an op on weights in each dtype of blocks for which a kernel packs them."""
    if KIND_DTYPE not in target.dtypes or op.name not in KIND_SHAPES:
        return
    kernels = [k for k in target.selection.kernels if k.op == op.name and k.pack]
    for kind in BLOCK_DTYPES if kernels else ():
        case, packed = kind_case(target, op, kind, KIND_TOKENS[0])
        if OpCall(target, op, case, KIND_DTYPE, packed).layout != PLAIN:
            for tokens in KIND_TOKENS:
                run = partial(_kind, target, op, kind, tokens)
                name = f"{op.name}/packed/{kind}/{tokens}/{KIND_DTYPE}"
                yield Check("kernel", name, run)


def kind_case(
    target: Target, op: OpSpec, kind: str, tokens: int
) -> tuple[Case, dict[str, HostArray]]:
    """Return a case of ``tokens`` rows, and its weights in blocks of a dtype."""
    w, packed = _blocks(target, op, kind)
    rng, name = target.rng(op.name, kind, tokens), f"packed/{kind}/{tokens}"
    if op.name == "embedding":
        ids = rng.integers(0, len(w.weight), tokens).astype(np.int32)
        return Case(name, (ids, w)), packed
    x = rng.standard_normal((tokens, next(iter(w)).shape[-1])) / 64
    attrs = {} if op.name.endswith("linear") else {"activation": "silu"}
    if op.name != "experts":
        return Case(name, (x, w), attrs), packed
    ids = np.argsort(rng.random((tokens, len(w.gate))), -1)[:, :2].astype(np.int32)
    shares = rng.random(ids.shape).astype(np.float32)
    return Case(name, (x, ids, shares, w), attrs), packed


@lru_cache(maxsize=64)
def _blocks(target: Target, op: OpSpec, kind: str) -> tuple[Any, dict[str, HostArray]]:
    """Return weights of an op, and their blocks."""
    shapes = KIND_SHAPES[op.name]
    rng, weights = target.rng(op.name, kind), op.weights
    packed = {name: random_blocks(rng, kind, shape) for name, shape in shapes.items()}
    values = {name: np.float64(dequantize(array)) for name, array in packed.items()}
    return cast("Any", weights)(**values), packed


def random_blocks(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...]
) -> HostArray:
    """Return blocks of random bytes whose scales are neither tiny nor huge.

    So every code and many scales of groups occur, in blocks of any format. Of E4M3 they
    are exact in layouts with one scale for each row, as some matrix units need.
    """
    pool, (elements, size) = _pool(kind), BLOCKS[kind]
    data = pool[rng.integers(0, len(pool), math.prod(shape) // elements)]
    blocks = data.reshape(*shape[:-1], -1, size)
    if kind == FLOAT8_SCALED:  # files have one scale for a row
        blocks[..., :4] = blocks[..., :1, :4]
    elif kind == FLOAT8_BLOCKS:  # a code times 2**-3 has all digits
        ratios = rng.integers(0, 4, blocks.shape[:-1], np.uint8)
        blocks[..., 0] = blocks[..., :1, 0] - ratios
        codes = blocks[..., 1:]
        codes |= np.where(codes & 0x60, np.uint8(0), np.uint8(0x20))
    return HostArray(blocks.reshape(*shape[:-1], -1), kind, shape)


@lru_cache
def _pool(kind: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    elements, size = BLOCKS[kind]
    drawn = np.random.default_rng(size).integers(0, 256, (POOL, size), np.uint8)
    values = dequantize(HostArray(drawn, kind, (POOL, elements)))
    largest = np.abs(values).max(-1)
    found: np.ndarray[Any, np.dtype[np.uint8]]
    found = drawn[(largest >= NORMAL[0]) & (largest <= NORMAL[1])]
    assert len(found) > 0, kind
    return found


def _kind(target: Target, op: OpSpec, kind: str, tokens: int) -> Measure:
    case, packed = kind_case(target, op, kind, tokens)
    op_call = OpCall(target, op, case, KIND_DTYPE, packed)
    note = f"; weights in {kind}"
    result = run_checked(op_call, target.seed, note)
    return require_passed(judged(op_call, case, result), op_call, target.seed, note)


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
