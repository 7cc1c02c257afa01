"""The op ``inl::quantized_linear``: a linear layer with stored weights.

On a GPU, rows in float32 are rounded to a half type. Rows multiply float8 weights in
float8, with a scale per row; few rows multiply the other formats as they are stored,
many rows decoded weights, which one launch writes. On a CPU, weights are decoded block
by block, in its caches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from inl_torch.registered.dynamics import HAS_TRITON
from inl_torch.registered.product import ALIGNED, numbers
from inl_torch.registered.register import is_transformed, register

PAIR = 32
"""Codes of 4 bits whose halves share 16 bytes, as in GGUF."""

BLOCK = 2**19
"""Weights that a CPU decodes at a time."""

MAX_INT8_ROWS = 16
"""Most rows of bfloat16 for which torch's product with int8 weights takes less time
than decoding them."""


def decoded(
    packed: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, inputs: int
) -> torch.Tensor:
    """Return the weights [outputs, inputs], computed in float32.

    packed: floating; float8 or int8 [outputs, inputs]; or two codes in each byte, of 32
    the first 16 in the low halves. scale: [outputs, groups].
    """
    if scale is None:
        return packed.to(dtype)
    groups = codes(packed, torch.float32).view(*scale.shape, -1) * scale[:, :, None]
    return groups.flatten(1)[:, :inputs].to(dtype)


def codes(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return stored numbers [outputs, padded inputs] without their scales."""
    if packed.dtype == torch.uint8:
        halves = packed.view(len(packed), -1, PAIR // 2)
        values = halves.new_empty(*halves.shape[:2], 2, PAIR // 2, dtype=dtype)
        values[:, :, 0], values[:, :, 1] = halves & 15, halves >> 4
        return values.flatten(1).sub_(8)
    if packed.dtype == torch.float8_e4m3fn:
        return numbers(packed, dtype)
    return packed.to(dtype)


def _run(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cuda" and x.dtype != torch.float64 and rows.numel():
        y = _on_gpu(rows, packed, scale, bias)
    else:
        y = _by_blocks(rows, packed, scale, bias)
    return y.to(x.dtype).view(*x.shape[:-1], len(packed))


def _by_blocks(
    rows: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    dtype, inputs = rows.dtype, rows.shape[1]
    # Sums of codes, which are large, overflow in float16.
    is_scaled_after = (
        scale is not None and scale.shape[1] == 1 and packed.dtype != torch.uint8
        and dtype != torch.float16
    )  # fmt: skip
    if is_scaled_after and _has_int8_product(rows, packed):
        y = torch._weight_int8pack_mm(
            rows.contiguous(), packed, rows.new_ones(len(packed))
        )
    else:
        y = rows.new_empty(len(rows), len(packed))
        size = max(BLOCK // max(inputs, 1), PAIR)
        for start in range(0, len(packed), size):
            part = slice(start, start + size)
            if is_scaled_after:
                weight = codes(packed[part], dtype)
            else:
                own = None if scale is None else scale[part]
                weight = decoded(packed[part], own, dtype, inputs)
            y[:, part] = functional.linear(rows, weight)
    if is_scaled_after and scale is not None:
        y = y * scale[:, 0]
    return y if bias is None else y + bias


def _has_int8_product(rows: torch.Tensor, packed: torch.Tensor) -> bool:
    return (
        packed.dtype == torch.int8
        and rows.dtype == torch.bfloat16
        and rows.device.type == "cpu"
        and 0 < len(rows) <= MAX_INT8_ROWS
        and packed.shape[1] % PAIR == 0
        and hasattr(torch, "_weight_int8pack_mm")
    )


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the op; directly where nothing records it, which takes less time."""
    if scale is None and x.dtype == packed.dtype:
        return functional.linear(x, packed, None if bias is None else bias.to(x.dtype))
    has_gradient = torch.is_grad_enabled() and x.requires_grad
    call = quantized_linear if has_gradient or is_transformed(x, packed) else _run
    result: torch.Tensor = call(x, packed, scale, bias)
    return result


def _on_gpu(
    rows: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    half = packed.dtype if scale is None else torch.bfloat16
    rows = rows.to(half) if rows.dtype == torch.float32 else rows
    bias = None if bias is None else bias.to(rows.dtype)
    if scale is None or not _has_kernel(packed, rows.shape[1]):
        weight = decoded(packed, scale, rows.dtype, rows.shape[1])
        return functional.linear(rows, weight, bias)
    products, float8 = _products(rows.device)
    if packed.dtype == torch.float8_e4m3fn:
        from inl_torch.triton.float8.weights import Float8

        result: torch.Tensor = float8.product(
            rows, Float8(packed, scale.flatten()), bias
        )
        return result
    from inl_torch.triton.quantized.packed import Packed
    from inl_torch.triton.quantized.products import fastest

    return fastest(rows, Packed(packed, scale), bias, products)


def _has_kernel(packed: torch.Tensor, inputs: int) -> bool:
    """Whether Triton kernels multiply stored weights of these sizes."""
    if not HAS_TRITON or torch.version.hip:
        return False
    if packed.dtype == torch.float8_e4m3fn:
        capable = torch.cuda.get_device_capability(packed.device) >= (8, 9)
        return capable and not (inputs % ALIGNED or len(packed) % ALIGNED)
    return inputs % (ALIGNED if packed.dtype == torch.int8 else PAIR) == 0


@cache
def _products(device: torch.device) -> tuple[Any, Any]:
    """Return launch parameters of a GPU, and its products with float8."""
    from inl_torch.triton.float8.products import Products
    from inl_torch.triton.tuning import Tuning

    chip = torch.cuda.get_device_properties(device)
    tuning = Tuning(processors=chip.multi_processor_count)
    return tuning, Products(tuning)


def _fake(x: Any, packed: Any, _scale: Any, _bias: Any) -> Any:
    return x.new_empty(*x.shape[:-1], len(packed))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    x, packed, scale, _ = inputs
    ctx.save_for_backward(packed, scale)
    ctx.width = x.shape[-1]


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    packed, scale = ctx.saved_tensors
    weight = decoded(packed, scale, gradient.dtype, ctx.width)
    return gradient @ weight, None, None, None


def _batched(info: Any, dims: Any, x: Any, *weights: Any) -> Any:  # noqa: ARG001 - passed by torch
    if any(dim is not None for dim in dims[1:]):
        raise NotImplementedError("inl::quantized_linear: vmap over stored weights")
    return quantized_linear(x.movedim(dims[0], 0), *weights), 0


quantized_linear = register(
    "inl::quantized_linear",
    _run,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    batched=_batched,
)
"""(x [..., inputs], packed, scale, bias): [..., outputs], in the dtype of ``x``."""
