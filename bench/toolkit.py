"""Compare ``inl.kernels``, dynamics and quantized layers with torch or JAX alone.

Each line has a case, the time of INL, the time and name of the fastest other way to
compute it in the same dtype, their ratio (above 1: INL is faster), the largest error of
both against float64, relative to its largest number, and the seconds of the first call,
compilation included. Exits with 1 where an error is above the bound of a dtype.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

ROWS = (1, 64, 1024, 4096, 65536)
WIDTH = 1024
LAYER = 4096
BOUNDS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "float8_e4m3fn": 6e-2}
"""Largest error of a product, an attention or a norm."""
ROUNDED = {
    "float16": {"use_fp16": True},
    "bfloat16": {"use_bfloat16": True},
    "float8_e4m3fn": {"precision": "float8_e4m3fn"},
}

Call = Callable[[], Any]


class Case(NamedTuple):
    """One line: calls without arguments that compute the same."""

    name: str
    dtype: str
    own: Call
    others: dict[str, Call]
    exact: Call | None = None
    bound: float | None = None


class Torch:
    """Arrays and times of torch."""

    def __init__(self, device: str, has_compiler: bool) -> None:
        import torch

        self.torch, self.device, self.has_compiler = torch, device, has_compiler
        self.generator = torch.Generator(device).manual_seed(0)

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        made = self.torch.randn(*shape, device=self.device, generator=self.generator)
        return made.to(getattr(self.torch, dtype))

    def wide(self, x: Any) -> Any:
        return x.double()

    def wait(self, result: Any) -> None:
        del result
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def host(self, x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else x.detach().double().cpu().numpy()

    def compiled(self, call: Call) -> dict[str, Call]:
        return {"compile": self.torch.compile(call)} if self.has_compiler else {}


class Jax:
    """Arrays and times of JAX."""

    def __init__(self) -> None:
        import jax

        self.jax, self.device = jax, jax.default_backend()
        self.rng = np.random.default_rng(0)

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        made = self.rng.standard_normal(shape, np.float32)
        return self.jax.numpy.asarray(made, dtype)

    def wide(self, x: Any) -> Any:
        return np.asarray(x, np.float64)

    def wait(self, result: Any) -> None:
        self.jax.block_until_ready(result)

    def host(self, x: Any) -> Any:
        return np.asarray(x, np.float64)


def microseconds(tools: Any, call: Call, seconds: float) -> float:
    """Return the least mean time of a few rounds, after a warm-up."""
    start = time.perf_counter()
    tools.wait(call())
    once = max(time.perf_counter() - start, 1e-6)
    count, best = max(int(seconds / 4 / once), 1), np.inf
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        tools.wait(result)
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


def products(tools: Any, rows: tuple[int, ...]) -> Iterator[Case]:
    from inl.kernels import gemm

    b32 = tools.array(WIDTH, WIDTH)
    for count in rows:
        a32 = tools.array(count, WIDTH)

        def exact(a: Any = a32, b: Any = b32) -> Any:
            return tools.wide(a) @ tools.wide(b)

        yield Case(
            f"gemm {count} rows", "float32", lambda a=a32: gemm(a, b32),
            plain(tools, lambda a, b: a @ b, a32, b32), exact,
        )  # fmt: skip
        for dtype, fields in ROUNDED.items():
            half = "float16" if dtype == "float16" else "bfloat16"
            narrow = in_dtype(tools, half)
            others = plain(tools, lambda a, b, n=narrow: (n(a) @ n(b)) * 1.0, a32, b32)
            yield Case(
                f"gemm {count} rows of float32", dtype,
                lambda a=a32, f=fields: gemm(a, b32, **f), others, exact,
            )  # fmt: skip
        x, y = (in_dtype(tools, "bfloat16")(each) for each in (a32, b32))
        yield Case(
            f"gemm {count} rows, stored", "bfloat16", lambda x=x, y=y: gemm(x, y),
            plain(tools, lambda a, b: a @ b, x, y), lambda x=x, y=y: exact(x, y),
        )  # fmt: skip


def in_dtype(tools: Any, name: str) -> Callable[[Any], Any]:
    if isinstance(tools, Torch):
        return lambda x: x.to(getattr(tools.torch, name))
    return lambda x: x.astype(name)


def plain(tools: Any, call: Callable[..., Any], *operands: Any) -> dict[str, Call]:
    """Return the ways to compute a call without INL."""
    if isinstance(tools, Torch):
        ways = {"eager": call}
        if tools.has_compiler:
            ways["compile"] = tools.torch.compile(call, dynamic=False)
    else:
        ways = {"jit": tools.jax.jit(call)}
    return {name: lambda w=way: w(*operands) for name, way in ways.items()}


def attentions(tools: Any, lengths: tuple[int, ...]) -> Iterator[Case]:
    from inl.kernels import flash_attention

    for length in lengths:
        for dtype in ("float32", "float16", "bfloat16"):
            for groups, window in ((8, None), (2, None), (8, 256)):
                q = tools.array(2, 8, length, 64, dtype=dtype)
                k, v = (tools.array(2, groups, length, 64, dtype=dtype) for _ in "kv")

                def own(q: Any = q, k: Any = k, v: Any = v, w: Any = window) -> Any:
                    return flash_attention(q, k, v, causal=True, window=w)

                if not isinstance(tools, Torch):
                    jitted = tools.jax.jit(own)
                    own = lambda q=q, k=k, v=v, f=jitted: f(q, k, v)  # noqa: E731
                yield Case(
                    f"attention {length} x {groups} heads, window {window}", dtype, own,
                    fused(tools, q, k, v, window),
                    lambda q=q, k=k, v=v, w=window: exact_attention(tools, q, k, v, w),
                )  # fmt: skip


def fused(tools: Any, q: Any, k: Any, v: Any, window: int | None) -> dict[str, Call]:
    """Return attention of the framework alone."""
    if isinstance(tools, Torch):
        sdpa = tools.torch.nn.functional.scaled_dot_product_attention
        mask = None
        if window is not None:
            ones = tools.torch.ones(2 * q.shape[2:3], dtype=bool, device=tools.device)
            mask = ones.tril() & ones.triu(1 - window)
        grouped = k.shape[1] != q.shape[1]
        return {
            "SDPA": lambda: sdpa(
                q, k, v, mask, is_causal=mask is None, enable_gqa=grouped
            )
        }
    x, y, z = (tools.jax.numpy.swapaxes(each, 1, 2) for each in (q, k, v))
    size = None if window is None else (window - 1, 0)
    ways = {"xla": "xla"}
    if tools.device == "gpu" and str(q.dtype) != "float32":
        ways["cudnn"] = "cudnn"

    def way(kind: str) -> Call:
        def call(x: Any, y: Any, z: Any) -> Any:
            return tools.jax.nn.dot_product_attention(
                x, y, z, is_causal=True, local_window_size=size, implementation=kind
            )

        jitted = tools.jax.jit(call)
        return lambda: jitted(x, y, z)

    return {name: way(kind) for name, kind in ways.items()}


def exact_attention(tools: Any, q: Any, k: Any, v: Any, window: int | None) -> Any:
    q, k, v = (tools.host(each) for each in (q, k, v))
    k, v = (each.repeat(q.shape[1] // each.shape[1], 1) for each in (k, v))
    at = np.arange(q.shape[2])
    far = at[:, None] - at
    seen = (far >= 0) & (far < (window or far.size))
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / 8, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def norms(tools: Any, rows: tuple[int, ...]) -> Iterator[Case]:
    from inl.kernels import layer_norm

    w, b = tools.array(WIDTH), tools.array(WIDTH)
    for count in rows:
        x = tools.array(count, WIDTH)
        if isinstance(tools, Torch):
            others = plain(
                tools,
                lambda x, w, b: tools.torch.nn.functional.layer_norm(x, (WIDTH,), w, b),
                x,
                w,
                b,
            )
        else:
            others = plain(
                tools,
                lambda x, w, b: (x - x.mean(-1, keepdims=True))
                * tools.jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * w + b,
                x, w, b,
            )  # fmt: skip

        def exact(x: Any = x) -> Any:
            wide = tools.host(x)
            normal = wide - wide.mean(-1, keepdims=True)
            normal /= np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
            return normal * tools.host(w) + tools.host(b)

        yield Case(
            f"layer_norm {count} rows", "float32",
            lambda x=x: layer_norm(x, w, b), others, exact,
        )  # fmt: skip


def quantized(tools: Torch, rows: tuple[int, ...]) -> Iterator[Case]:
    from inl.optimizers import quantize_for_inference

    torch = tools.torch
    layer = torch.nn.Linear(LAYER, LAYER, bias=False, device=tools.device)
    half = torch.nn.Linear(LAYER, LAYER, bias=False, device=tools.device).bfloat16()
    half.weight.data.copy_(layer.weight.data)
    for dtype in ("bf16", "fp8", "int8", "int4"):
        (small,) = quantize_for_inference(layer, dtype)
        weight = small.weight(torch.float64)
        bound = 6e-2 if dtype == "fp8" else 2e-2
        for count in rows:
            x = tools.array(count, LAYER, dtype="bfloat16")
            yield Case(
                f"quantized {dtype} {count} rows", "bfloat16",
                torch.no_grad()(lambda x=x, s=small: s(x)),
                {"bf16": torch.no_grad()(lambda x=x: half(x))},
                lambda x=x, w=weight: x.double() @ w.T, bound,
            )  # fmt: skip


def dynamics(tools: Any, rows: tuple[int, ...]) -> Iterator[Case]:
    from inl import inl_dynamics

    def formula(x: Any, v: Any, m: Any, a: Any, b: Any, g: Any) -> Any:
        v = a * v - b * (x - m)
        return x + 0.1 * g * v, v

    for count in rows:
        given = [tools.array(count, WIDTH) for _ in range(6)]
        own, ways = inl_dynamics, {"eager": formula}
        if isinstance(tools, Jax):
            own, ways = tools.jax.jit(inl_dynamics), {"jit": tools.jax.jit(formula)}
        elif tools.has_compiler:
            ways["compile"] = tools.torch.compile(formula, dynamic=False)
        yield Case(
            f"dynamics {count} rows", "float32",
            lambda x=given, f=own: f(*x)[0],
            {n: lambda x=given, f=f: f(*x)[0] for n, f in ways.items()},
            lambda x=given: formula(*map(tools.host, x))[0],
        )  # fmt: skip
        if isinstance(tools, Torch):
            leaves = [each.clone().requires_grad_() for each in given]

            def train(f: Any, x: Any = leaves) -> Any:
                y, v = f(*x)
                return tools.torch.autograd.grad(y.sum() + v.sum(), x)[3]

            yield Case(
                f"dynamics {count} rows, gradients", "float32",
                lambda t=train: t(inl_dynamics),
                {n: lambda t=train, f=f: t(f) for n, f in ways.items()},
                lambda x=given: tools.host(x[1]) * (1 + 0.1 * tools.host(x[5])),
            )  # fmt: skip


def measure(tools: Any, case: Case, seconds: float) -> tuple[float, bool]:
    """Print the line of a case; return its ratio and whether its error is small."""
    start = time.perf_counter()
    found = case.own()
    tools.wait(found)
    first = time.perf_counter() - start
    errors = []
    exact = tools.host(case.exact()) if case.exact else None
    best, name = np.inf, "none"
    for other, call in case.others.items():
        result = call()
        taken = microseconds(tools, call, seconds)
        if taken < best:
            best, name, kept = taken, other, result
    own = microseconds(tools, case.own, seconds)
    if exact is not None:
        if kept.shape != exact.shape:  # JAX has [B, L, H, d]
            kept = tools.host(kept).swapaxes(1, 2)
        held = [each if isinstance(each, np.ndarray) else tools.host(each)
                for each in (found, kept)]  # fmt: skip
        errors = [np.abs(each - exact).max() / np.abs(exact).max() for each in held]
    # JAX multiplies float32 in TF32 on GPUs: what it does itself is no error of ours.
    most = max(case.bound or BOUNDS[case.dtype], 2 * errors[1] if errors else 0)
    good = not errors or bool(errors[0] <= most)
    print(
        f"{case.name:44} {case.dtype:14} {own:10.1f} {best:10.1f} {name:8} "
        f"{best / own:6.2f}  {errors[0]:.1e} {errors[1]:.1e} {first:6.2f} s"
        f"{'' if good else '  WRONG'}",
        flush=True,
    )
    return best / own, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="also torch.compile")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--lengths", type=int, nargs="+", default=(512, 2048))
    parser.add_argument("--seconds", type=float, default=0.2, help="of each time")
    parser.add_argument("--only", nargs="+", help="gemm, attention, norm, ...")
    words = parser.parse_args()
    is_torch = words.framework == "torch"
    tools: Any = Torch(words.device, words.compile) if is_torch else Jax()
    rows, small = tuple(words.rows), (1, 8, 16, 32, 64, 128, 256)
    groups: dict[str, Callable[[], Iterator[Case]]] = {
        "gemm": lambda: products(tools, rows),
        "attention": lambda: attentions(tools, tuple(words.lengths)),
        "norm": lambda: norms(tools, rows),
        "dynamics": lambda: dynamics(tools, rows),
    }
    if is_torch:
        groups["quantized"] = lambda: quantized(tools, small)
    print(f"{words.framework} on {tools.device}; microseconds: INL, best other")
    found, failed = [], []
    for name, cases in groups.items():
        if words.only and name not in words.only:
            continue
        for case in cases():
            try:
                found.append(measure(tools, case, words.seconds))
            except Exception as error:  # the sweep goes on
                failed.append(case.name)
                print(f"{case.name:44} {case.dtype:14} FAILED {error!r:.300}")
    wrong = sum(not good for _, good in found)
    slow = sum(ratio < 0.95 for ratio, _ in found)
    print(f"{len(found)} cases, {slow} below 0.95, {wrong} wrong, {len(failed)} failed")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
