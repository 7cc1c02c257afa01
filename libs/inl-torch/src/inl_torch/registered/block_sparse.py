"""Products with block-sparse matrices on devices with Triton kernels.

The two functions are each other's derivatives, so derivatives of every order exist.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.block_structure import BlockStructure
from inl.spec.explained import RECORDS, refuse, report
from inl_torch.registered import dynamics
from inl_torch.registered.autocast import autocast
from inl_torch.registered.register import is_transformed


def block_sparse(
    x: torch.Tensor, values: torch.Tensor, structure: BlockStructure
) -> torch.Tensor | None:
    """Return ``x`` [..., K] times the matrix, or ``None`` where there is no kernel.

    Transforms of torch and dtypes or devices that differ use the plain formula.
    """
    if x.device.type not in dynamics.TRITON_DEVICES or not dynamics.HAS_TRITON:
        refuse("block_sparse/triton", f"{x.device.type} has no Triton")
        return None
    from inl_torch.triton.sparse import products

    x, values = autocast(x, values)
    alike = x.dtype == values.dtype and x.device == values.device
    supported = alike and products.is_supported(x, structure.size)
    if not supported or is_transformed(x, values):
        why = f"{x.dtype}, {values.dtype}, blocks of {structure.size}, or a transform"
        refuse("block_sparse/triton", why)
        return None
    if RECORDS:
        kind = str(x.dtype).removeprefix("torch.")
        report("block_sparse/triton", f"{kind} operands, sums in float32")
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or values.requires_grad):
        y = _product(rows, values, structure, False)
    else:
        y = products.multiply(rows, values, structure, False)
    result: torch.Tensor = y.view(*x.shape[:-1], y.shape[-1])
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, values: Any, structure: BlockStructure, transposed: bool
    ) -> Any:
        from inl_torch.triton.sparse import products

        ctx.save_for_backward(x, values)
        ctx.structure, ctx.transposed = structure, transposed
        return products.multiply(x, values, structure, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,), (x, values) = gradients, ctx.saved_tensors
        d_x = d_values = None
        if ctx.needs_input_grad[0]:
            d_x = _product(g, values, ctx.structure, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            pair = (g, x) if ctx.transposed else (x, g)
            d_values = _sample(*pair, ctx.structure)
        return d_x, d_values, None, None


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any, structure: BlockStructure) -> Any:
        from inl_torch.triton.sparse import products

        ctx.save_for_backward(left, right)
        ctx.structure = structure
        return products.sample(left, right, structure)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,), (left, right) = gradients, ctx.saved_tensors
        d_left = d_right = None
        if ctx.needs_input_grad[0]:
            d_left = _product(right, g, ctx.structure, True)
        if ctx.needs_input_grad[1]:
            d_right = _product(left, g, ctx.structure, False)
        return d_left, d_right, None


# ``apply`` is untyped.
_product: Any = _Product.apply
_sample: Any = _Sample.apply
