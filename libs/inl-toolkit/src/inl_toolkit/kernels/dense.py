"""Products and layer normalization."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from inl.errors import KernelError
from inl.spec.explained import RECORDS, refuse, report
from inl_toolkit.functional.arrays import ArrayModule, cast, dtype_name, module_of
from inl_toolkit.functional.dynamics import framework_of, functions_of
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.kernels.config import KernelConfig, configured
from inl_toolkit.kernels.operands import check_arrays, check_number
from inl_toolkit.kernels.precision import FLOAT8, rounded, scaled_float8
from inl_toolkit.kernels.profile import recorded

HALF = ("bfloat16", "float16")


def widened(x: Any) -> Any:
    """Convert float16 and bfloat16 to float32."""
    if x.dtype.itemsize != 2 or dtype_name(x) not in HALF:
        return x
    narrow_only = framework_of("widened", "x", x) == "torch"
    return x.float() if narrow_only else cast(x, "float32")


@translating
def gemm(
    a: Any,
    b: Any,
    *,
    block_size: int | None = None,
    use_bfloat16: bool | None = None,
    use_fp16: bool | None = None,
    precision: Any = None,
) -> Any:
    """Product of ``a`` [..., M, K] and ``b`` [K, N] or [..., K, N]: [..., M, N].

    The other parameters are fields of :class:`~inl.kernels.KernelConfig`; by default
    those of the decorated function around the call. Sums are float32 or wider; the
    result has the dtype of ``a``. Raises :class:`~inl.errors.KernelError` for shapes
    that do not match.
    """
    framework = check_arrays("gemm", a=a, b=b)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise KernelError(
            f"gemm: found {list(a.shape)} and {list(b.shape)}, accepted: [..., M, K] "
            "and [..., K, N]"
        )
    config = configured(
        block_size=block_size,
        use_bfloat16=use_bfloat16,
        use_fp16=use_fp16,
        precision=precision,
    )
    name = f"gemm/{config.rounding or config.precision}"
    # One program for all of it: JAX would launch each rounding by itself.
    run = _jitted() if framework == "jax" and not RECORDS else _gemm
    return recorded(name, a, lambda: run(a, b, config))


@cache
def _jitted() -> Any:
    return import_module("jax").jit(_gemm, static_argnums=2)


def half_type(*arrays: Any) -> str:
    """Return the half type that all arrays have, or ""."""
    dtype = arrays[0].dtype
    if dtype.itemsize != 2 or any(each.dtype != dtype for each in arrays):
        return ""
    name = dtype_name(arrays[0])
    return name if name in HALF else ""


def _gemm(a: Any, b: Any, config: KernelConfig) -> Any:
    dtype = a.dtype
    inputs = config.rounding or half_type(a, b)
    is_whole = (config.block_size or a.shape[-1]) >= a.shape[-1]
    if inputs and is_whole:
        y = own_product(a, b, inputs)
        if y is not None:
            return y
    if RECORDS:
        _report_plain(a, config, inputs, is_whole)
    xp = module_of("gemm", "a", a)
    x, y = widened(a), widened(b)
    factor: Any = None
    if config.rounding == FLOAT8:
        (x, first), (y, second) = scaled_float8(x, xp), scaled_float8(y, xp)
        factor = first * second
    elif config.rounding:
        x, y = rounded(x, config.rounding), rounded(y, config.rounding)
    inner = x.shape[-1]
    size = min(config.block_size or inner, inner)
    if size == inner:
        total = product(xp, x, y, config)
    else:
        total = 0
        for first_k in range(0, inner, size):
            part = slice(first_k, first_k + size)
            pair = x[..., part], y[..., part, :]
            # The derivatives of the scales of float8 cancel in float32 only.
            is_own = inputs and inputs != FLOAT8
            found = own_product(*pair, inputs) if is_own else None
            total = total + (product(xp, *pair, config) if found is None else found)
    return cast(total if factor is None else total * factor, dtype)


def _report_plain(a: Any, config: KernelConfig, inputs: str, is_whole: bool) -> None:
    framework, dtype = framework_of("gemm", "a", a), dtype_name(a)
    wide = "float32" if dtype in HALF else dtype
    if inputs and not is_whole:
        size = config.block_size
        refuse("gemm of the device", f"block_size={size} divides the summed axis")
    if config.use_tensor_cores and "cuda" not in str(getattr(a, "device", "")):
        refuse("tensor cores", "use_tensor_cores is of NVIDIA GPUs")
    rounding = f", rounded to {inputs}" if inputs else ""
    precision = f"{wide} operands{rounding}; sums in {wide}"
    if config.precision in ("high", "highest"):
        precision += f"; precision={config.precision}"
    report(f"gemm/{framework}", precision)


def own_product(a: Any, b: Any, inputs: str) -> Any:
    """Multiply arrays rounded to ``inputs`` by a kernel of their device, if any."""
    own = functions_of(framework_of("gemm", "a", a)).product
    return None if own is None else own(a, b, inputs)


def product(xp: ArrayModule, x: Any, y: Any, config: KernelConfig) -> Any:
    """Multiply with the configured precision on devices that have several."""
    if config.precision in ("high", "highest") and hasattr(xp, "float8_e4m3fn"):
        jax = import_module("jax")
        return jax.numpy.matmul(x, y, precision=config.precision)
    return xp.matmul(x, y)


@translating
def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    use_fused_ops: bool | None = None,
) -> Any:
    """Layer normalization (Ba et al., 2016) over the last axis of ``x`` [..., H].

    scale, bias: [H] or ``None``. Half types are computed in float32. use_fused_ops: by
    default that of the decorated function around the call. Raises
    :class:`~inl.errors.KernelError` for shapes that do not match.
    """
    check_number("layer_norm", "eps", eps, -1e-30)
    given = {"scale": scale, "bias": bias}
    rows = {name: each for name, each in given.items() if each is not None}
    framework = check_arrays("layer_norm", floating=True, x=x, **rows)
    for name, each in rows.items():
        if tuple(each.shape) != tuple(x.shape[-1:]):
            raise KernelError(
                f"layer_norm: {name}: found {list(each.shape)}, accepted: "
                f"{list(x.shape[-1:])}"
            )
    wanted = configured(use_fused_ops=use_fused_ops).use_fused_ops
    fused = wanted and framework in ("torch", "jax")
    name = "layer_norm/fused" if fused else "layer_norm/formula"
    run = _fused(framework) if fused else _formula
    if RECORDS:
        if not fused:
            why = "use_fused_ops is off" if not wanted else "NumPy has no such function"
            refuse("layer_norm/fused", why)
        dtype = dtype_name(x)
        wide = "float32" if dtype in HALF else dtype
        report(f"{name} of {framework}", f"{dtype} rows, computed in {wide}")
    return recorded(name, x, lambda: run(x, scale, bias, eps))


def _formula(x: Any, scale: Any, bias: Any, eps: float) -> Any:
    xp, wide = module_of("layer_norm", "x", x), widened(x)
    centered = wide - xp.mean(wide, axis=-1, keepdims=True)
    variance = xp.mean(xp.square(centered), axis=-1, keepdims=True)
    y = centered / xp.sqrt(variance + eps)
    y = y if scale is None else y * widened(scale)
    return cast(y if bias is None else y + widened(bias), x.dtype)


@cache
def _fused(framework: str) -> Any:
    if framework == "jax":
        return import_module("jax").jit(_formula, static_argnums=3)
    function = import_module("torch.nn.functional").layer_norm
    return lambda x, scale, bias, eps: function(x, x.shape[-1:], scale, bias, eps)
