"""The op ``inl::quantized_linear``: a linear layer with stored weights.

On a GPU, rows in float32 are rounded to a half type. Up to :data:`MAX_STORED` rows
multiply weights as they are stored, in one launch; more rows multiply float8 weights in
float8, with a scale per row, and other formats decoded, which one launch writes. On a
CPU, weights are decoded block by block, in its caches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from inl.spec.explained import RECORDS, refuse, report
from inl_torch.registered.dynamics import HAS_TRITON
from inl_torch.registered.product import ALIGNED, numbers
from inl_torch.registered.register import is_transformed, is_wrapped, register

PAIR = 32
"""Codes of 4 bits whose halves share 16 bytes, as in GGUF."""

BLOCK = 2**19
"""Weights that a CPU decodes at a time."""

MAX_STORED = {torch.uint8: 32, torch.int8: 128, torch.float8_e4m3fn: 128}
"""Most rows of which a GPU decodes the weights within the product, by their dtype:
each block of rows decodes them again. Measured on an H200 at 4,096 x 4,096."""

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
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if x.is_cuda and x.dtype != torch.float64 and rows.numel():
        y = _on_gpu(rows, packed, scale, bias)
    else:
        y = _by_blocks(rows, packed, scale, bias)
    y = y if y.dtype == x.dtype else y.to(x.dtype)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], len(packed))


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
    is_int8 = is_scaled_after and _has_int8_product(rows, packed)
    if RECORDS:
        kind = "int8pack_mm" if is_int8 else "weights decoded by blocks"
        precision = f"{_name(packed)} weights, {_name(rows)} rows"
        report(f"quantized_linear/torch, {kind}", precision)
    if is_int8:
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


def _name(x: torch.Tensor) -> str:
    """Return the name of what a tensor stores."""
    name = str(x.dtype).removeprefix("torch.")
    return "int4" if name == "uint8" else name


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
        if RECORDS:
            report("quantized_linear/torch", f"{_name(packed)} rows and weights")
        return functional.linear(x, packed, None if bias is None else bias.to(x.dtype))
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    is_plain = type(x) is torch.Tensor and not torch.compiler.is_compiling()
    # Of plain tensors the rest of ``is_transformed`` takes as long as a launch.
    is_recorded = is_wrapped(x) if is_plain else is_transformed(x, packed)
    call = quantized_linear if has_gradient or is_recorded else _run
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
    why = "weights have no scales" if scale is None else ""
    why = why or _why_no_kernel(
        packed.dtype, packed.device, rows.shape[1], packed.shape[0]
    )
    if RECORDS:
        _report(rows, packed, why)
    if scale is not None and not why and rows.shape[0] <= MAX_STORED[packed.dtype]:
        stored = _stored_product()
        tuning = _products(rows.device)[0]
        small: torch.Tensor = stored(rows, packed, scale, bias, tuning)
        return small
    bias = None if bias is None else bias.to(rows.dtype)
    if scale is None or why:
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


@cache
def _stored_product() -> Any:
    from inl_torch.triton.quantized.products import multiply_stored

    return multiply_stored


@cache
def _why_no_kernel(
    stored: torch.dtype, device: torch.device, inputs: int, outputs: int
) -> str:
    """Return why Triton kernels do not multiply stored weights, "" if they do."""
    if not HAS_TRITON or torch.version.hip:
        return "needs an NVIDIA GPU and Triton"
    if stored == torch.float8_e4m3fn:
        found = torch.cuda.get_device_capability(device)
        if found < (8, 9):
            return f"float8 needs compute capability 8.9, found {found[0]}.{found[1]}"
        if inputs % ALIGNED or outputs % ALIGNED:
            return f"takes multiples of {ALIGNED}, found {outputs} x {inputs}"
        return ""
    multiple = ALIGNED if stored == torch.int8 else PAIR
    return "" if inputs % multiple == 0 else f"takes multiples of {multiple} inputs"


def _report(rows: torch.Tensor, packed: torch.Tensor, why: str) -> None:
    precision = f"{_name(packed)} weights, {_name(rows)} rows"
    refuse("quantized_linear/triton", why)
    if why:
        report("quantized_linear/torch, decoded weights", precision)
    elif len(rows) <= MAX_STORED[packed.dtype]:
        report("quantized_linear/triton, one launch", precision)
    elif packed.dtype == torch.float8_e4m3fn:
        report("quantized_linear/triton float8", f"{precision} rounded to float8")
    else:
        why = f"{len(rows)} rows, at most {MAX_STORED[packed.dtype]}"
        refuse("quantized_linear/triton, one launch", why)
        report("quantized_linear/triton decodes, torch multiplies", precision)


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
