"""The op ``inl::product``: products on matrix units, of operands that are rounded.

Their sums are float32. The derivative multiplies gradients that are rounded likewise.
"""

from __future__ import annotations

from typing import Any

import torch

from inl.spec.explained import RECORDS, refuse, report
from inl_torch.registered.register import is_transformed, is_wrapped, register

FLOAT8 = "float8_e4m3fn"
LARGEST_FLOAT8 = 448.0
ALIGNED = 16
"""What sizes of a product in float8 are multiples of."""

HAS_WIDE_SUMS = hasattr(torch.ops.aten.mm, "dtype") and not torch.version.hip
"""Whether products of half types give float32: since torch 2.8, on NVIDIA GPUs."""


def product(a: torch.Tensor, b: torch.Tensor, inputs: str) -> torch.Tensor | None:
    """Return ``a`` [..., M, K] @ ``b`` [K, N] or [..., K, N], in the dtype of ``a``.

    inputs: dtype that operands are rounded to; float8 with one scale per array.
    ``None`` where plain products of rounded operands are as good: of float64, under
    ``torch.func``, and on a CPU, but of bfloat16 arrays, and of float8 without
    derivatives.
    """
    on_gpu = a.is_cuda
    is_stored = a.dtype == b.dtype == torch.bfloat16 and inputs == "bfloat16"
    if not on_gpu and not is_stored and inputs != FLOAT8:
        why = f"products of float32 are as fast on {a.device.type}"
        refuse(f"gemm/torch {inputs}", why)
        return None
    if a.dtype == torch.float64 or b.dtype == torch.float64 or is_wrapped(a, b):
        refuse(f"gemm/torch {inputs}", "float64 operands, or a transform of torch.func")
        return None
    if a.dtype == b.dtype == getattr(torch, inputs):
        if RECORDS:
            report(f"gemm/torch {inputs}", f"{inputs} operands; sums in float32")
        return a @ b
    has_gradient = (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()
    if not on_gpu and inputs == FLOAT8:
        is_plain = not has_gradient and not is_transformed(a, b)
        is_full = a.is_floating_point() and b.is_floating_point() and a.numel()
        if is_plain and is_full and b.numel():
            return _run(a, b, inputs)
        refuse("gemm/torch float8", "gradients, a transform, integers or empty arrays")
        return None
    # The op takes longer to call than small products.
    is_plain = type(a) is type(b) is torch.Tensor and not torch.compiler.is_compiling()
    is_recorded = not is_plain and is_transformed(a, b)
    call = rounded_product if has_gradient or is_recorded else _run
    result: torch.Tensor = call(a, b, inputs)
    return result


def _run(a: torch.Tensor, b: torch.Tensor, inputs: str) -> torch.Tensor:
    if inputs != FLOAT8:
        dtype = getattr(torch, inputs)
        if RECORDS:
            report(f"gemm/torch {inputs}", f"{inputs} operands; sums in float32")
        result = _wide(a.to(dtype), b.to(dtype))
        return result if result.dtype == a.dtype else result.to(a.dtype)
    first, second = _scale(a), _scale(b)
    if not (why := why_not_float8(a, b)):
        report("gemm/torch scaled_mm", f"{FLOAT8}, a scale per array; sums in float32")
        x = _float8(a.reshape(-1, a.shape[-1]), first)
        # The units read both operands along the summed axis.
        y = _float8(b.mT.contiguous(), second).mT
        result = torch._scaled_mm(
            x, y, scale_a=first, scale_b=second, out_dtype=a.dtype, use_fast_accum=False
        )
        return result.view(*a.shape[:-1], b.shape[-1])
    # bfloat16 has every number of float8, and a CPU multiplies those of float32.
    wide = torch.bfloat16 if a.device.type == "cuda" else torch.float32
    refuse("gemm/torch scaled_mm", why)
    kind = str(wide).removeprefix("torch.")
    report(f"gemm/torch {kind}", f"operands rounded to {FLOAT8}; sums in float32")
    x, y = (
        numbers(_float8(each, scale), wide) for each, scale in ((a, first), (b, second))
    )
    return (_wide(x, y) * (first * second)).to(a.dtype)


def _wide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply half types; the result is float32."""
    if not x.is_cuda or not HAS_WIDE_SUMS:
        return x.float() @ y.float()
    if x.ndim == y.ndim == 2:
        return torch.mm(x, y, out_dtype=torch.float32)
    if y.ndim == 2:
        flat = torch.mm(x.reshape(-1, x.shape[-1]), y, out_dtype=torch.float32)
        return flat.view(*x.shape[:-1], y.shape[-1])
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
    x, y = (
        each.expand(*lead, *each.shape[-2:]).reshape(-1, *each.shape[-2:])
        for each in (x, y)
    )
    flat = torch.bmm(x, y, out_dtype=torch.float32)
    return flat.view(*lead, *flat.shape[-2:])


def _scale(x: torch.Tensor) -> torch.Tensor:
    """Return the factor [] of float8 numbers, the largest of which is 448."""
    if x.device.type == "cuda":
        largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    else:  # where the norm takes many times as long
        low, high = torch.aminmax(x)
        largest = torch.maximum(-low, high).float()
    scale: torch.Tensor = largest.clamp_min(1e-12) / LARGEST_FLOAT8
    return scale


def _float8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).to(torch.float8_e4m3fn)


def numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert numbers of float8, none of which is NaN, to a wider dtype."""
    if x.device.type != "cpu":
        return x.to(dtype)
    # The bits of bfloat16, with a bias of exponents that is larger by 120: torch would
    # convert one number at a time. The sign is that of the wider integer.
    bits = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(4)
    narrow = bits.bitwise_and_(0x7F0 - 2**15).view(torch.bfloat16)
    return narrow.to(dtype).mul_(2.0**120)


def why_not_float8(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return why the device does not multiply float8 of these shapes, "" if it does."""
    if a.device.type != "cuda" or torch.version.hip:
        return "needs an NVIDIA GPU"
    if b.ndim != 2 or not a.numel():
        return f"takes one matrix, found {list(a.shape)} and {list(b.shape)}"
    if any(size % ALIGNED for size in b.shape):
        return f"takes multiples of {ALIGNED}, found {list(b.shape)}"
    capability = torch.cuda.get_device_capability(a.device)
    if capability < (8, 9):
        return f"needs compute capability 8.9, found {capability[0]}.{capability[1]}"
    return ""


def _fake(a: Any, b: Any, _inputs: str) -> Any:
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return a.new_empty(*lead, a.shape[-2], b.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - passed by torch
    ctx.save_for_backward(*inputs[:2])
    ctx.inputs = "bfloat16" if inputs[2] == FLOAT8 else inputs[2]


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    (a, b), (wants_a, wants_b, _) = ctx.saved_tensors, ctx.needs_input_grad
    ga = gb = None
    if wants_a:
        ga = rounded_product(gradient, b.mT, ctx.inputs)
        ga = ga.sum_to_size(a.shape).to(a.dtype)
    if wants_b and b.ndim == 2:
        rows = a.reshape(-1, a.shape[-1])
        gb = rounded_product(rows.mT, gradient.reshape(len(rows), -1), ctx.inputs)
    elif wants_b:
        gb = rounded_product(a.mT, gradient, ctx.inputs).sum_to_size(b.shape)
    return ga, None if gb is None else gb.to(b.dtype), None


def _batched(info: Any, dims: Any, a: Any, b: Any, inputs: str) -> Any:
    """Multiply one by one, since each has its own scale."""
    pairs = [
        [x if dim is None else x.select(dim, i) for x, dim in zip((a, b), dims)]  # noqa: B905
        for i in range(info.batch_size)
    ]
    return torch.stack([rounded_product(*pair, inputs) for pair in pairs]), 0


rounded_product = register(
    "inl::product",
    _run,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    batched=_batched,
)
"""(a, b, inputs): as :func:`product`."""
