"""Rotary position embedding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops.rope import RopeScaling, frequencies
from inl.spec.kernel import Kernel
from inl_cpu.abi import Opcode
from inl_cpu.command_emitter import stride

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import Stage


def rope_table(
    stage: Stage, positions: Any, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Any, Any]:
    rates = np.ascontiguousarray(frequencies(dim, theta, scaling), np.float64)
    shape = (*positions.shape, dim // 2)
    cos, sin = stage.new(shape), stage.new(shape)
    data = [positions, rates, cos, sin]
    dims = [positions.shape[0], dim // 2, (scaling.rotary_dim or dim) // 2]
    stage.emit(Opcode.ROPE_TABLE, dims, data, [scaling.gain])
    return cos, sin


def rope(stage: Stage, q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    cos, sin = (x if x.flags.c_contiguous else stage.copied(x) for x in (cos, sin))
    return _turned(stage, q, cos, sin), _turned(stage, k, cos, sin)


def _turned(stage: Stage, x: Any, cos: Any, sin: Any) -> Any:
    x = stage.dense(x)
    out = stage.new(x.shape)
    dims = [*x.shape, stride(x), stride(out)]
    stage.emit(Opcode.ROPE, dims, [x, cos, sin, out])
    return out


def kernels(stage: Stage) -> Iterable[Kernel]:
    """The table once a step, the rotation in every layer."""
    for run in (rope_table, rope):
        yield Kernel(run.__name__, "native", partial(run, stage), invariant=True)
