"""Products of AITER, AMD's kernel library, where its table says that they are faster.

AITER's table has, for shapes that AMD measured on a chip, the fastest of its own
kernels and hipBLASLt's. Nothing here needs AITER.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Final

import torch

from inl.ops.linear import Linear
from inl.spec.kernel import Kernel
from inl_torch.eager.linear import QKV, StackedQkv, can_stack_qkv, stack_qkv

MODULE: Final = "aiter.tuned_gemm"
LIBRARY: Final = ("torch", "hipblaslt")
"""Kernels in AITER's table that are not its own: torch's products use the same."""

DTYPES: Final = ("bfloat16", "float16")

PREFERENCE: Final = 20
"""Above Triton's: AITER's table has measurements, and inl-rocm has none."""

logger = logging.getLogger(__name__)


@cache
def module() -> Any:
    """Return AITER's module of tuned products, ``None`` if it cannot be imported."""
    if find_spec("aiter") is None:
        return None
    try:
        return importlib.import_module(MODULE)
    except Exception as error:  # it compiles code when it is imported
        logger.warning("aiter is not used: %s: %s", type(error).__name__, error)
        return None


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [T, K] @ ``weight`` [N, K].T + ``bias`` [N]: [T, N], by AITER."""
    y: torch.Tensor = module().tgemm.mm(x, weight, bias, otype=x.dtype)
    return y


def linear(x: torch.Tensor, w: Linear) -> torch.Tensor:
    return product(x, w.weight, w.bias)


def qkv_linear(x: torch.Tensor, w: StackedQkv) -> tuple[torch.Tensor, ...]:
    keys = w.keys.shape[0]
    sizes = (w.weight.shape[0] - 2 * keys, keys, keys)
    return product(x, w.weight, w.bias).split_with_sizes(sizes, 1)


def slower(tuned: Any, x: Any, outputs: int, *, has_bias: bool) -> str | None:
    """Return why AITER is not faster at a product, ``None`` if its table says so."""
    # The dtype of a strict array is a name.
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        return f"takes {' and '.join(DTYPES)}, found {name}"
    rows, inputs = x.shape
    dtype = f"torch.{name}"
    entry = tuned.get_GEMM_A16W16_config(rows, outputs, inputs, has_bias, dtype, dtype)
    if not entry or "us" not in entry:
        return f"no product of {rows} x {inputs} x {outputs} in AITER's table"
    if entry["libtype"] in LIBRARY:
        return f"{entry['libtype']} is faster by AITER's table"
    return None


def _refuse(x: Any, w: Any, *, tuned: Any) -> str | None:
    return slower(tuned, x, w.weight.shape[0], has_bias=w.bias is not None)


def _refuse_qkv(x: Any, w: Any, *, tuned: Any) -> str | None:
    outputs = sum(part.shape[0] for part in (w.q, w.k, w.v))
    return slower(tuned, x, outputs, has_bias=w.q_bias is not None)


def kernels() -> Iterable[Kernel]:
    """Return the kernels, none where AITER is not installed or not usable."""
    tuned = module()
    if tuned is None:
        return
    yield Kernel(
        "linear",
        "aiter",
        linear,
        refuse=partial(_refuse, tuned=tuned),
        preference=PREFERENCE,
    )
    yield Kernel(
        "qkv_linear",
        "aiter",
        qkv_linear,
        refuse=partial(_refuse_qkv, tuned=tuned),
        layout=QKV,
        pack=stack_qkv,
        can_pack=can_stack_qkv,
        preference=PREFERENCE,
    )
