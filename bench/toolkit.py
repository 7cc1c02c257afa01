"""Compare ``inl.kernels``, dynamics and quantized layers with torch or JAX alone.

Each line has a case, the dtypes of its results and of the operands of its products, the
time of INL, the time and name of the fastest other way to compute it, their ratio
(above 1: INL is faster), the error of INL and its bound, and the seconds of the first
call, compilation included. Times are of processors on a CPU and of the wall on a GPU,
the least of rounds in which the ways take turns.

Results are compared with NumPy in float64 by :mod:`inl.spec.tolerance`, with the
tolerance of the op; rounding of operands is modeled as that of
``Kernel.activation_quant``. Another way that does not pass, or that the framework
refuses, is listed, and left out of the ratio. Exits with 1 where a result of INL does
not pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from inl.dtypes import rounded, rounded_e4m3
from inl.spec.activation_quant import FLOAT8, float8_rows
from inl.spec.op import CATALOG
from inl.spec.tolerance import Verdict, judge_result

ROWS = (1, 64, 1024, 4096, 65536)
WIDTH = 1024
LAYER = 4096
ROUNDS = 5
ROUNDED = {
    "float16": {"use_fp16": True},
    "bfloat16": {"use_bfloat16": True},
    "float8_e4m3fn": {"precision": "float8_e4m3fn"},
}

Call = Callable[[], Any]


class Case(NamedTuple):
    """One line: calls without arguments that compute the same."""

    name: str
    op: str
    """Of the catalog: its tolerance is that of the results."""
    dtype: str
    """Of the results."""
    own: Call
    others: dict[str, Call]
    body: Callable[..., Any]
    """Computes the result of NumPy operands in their dtype."""
    operands: tuple[Any, ...]
    inputs: str = ""
    """What operands of products are rounded to, one of :data:`NARROW`."""
    terms: int = 1
    """Products that are summed for a value."""


def float8_array(x: Any) -> Any:
    """Round to float8 values times one scale of the array."""
    scale = np.abs(x).max() / 448
    return rounded_e4m3(x / scale) * scale


def tfloat32(x: Any) -> Any:
    """Round to 10 digits after the first, as JAX multiplies float32 on GPUs."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(np.float32)


NARROW: dict[str, Callable[[Any], Any]] = {
    "": lambda x: x,
    "float16": lambda x: rounded(x, "float16"),
    "bfloat16": lambda x: rounded(x, "bfloat16"),
    "float8_e4m3fn": float8_array,
    "tfloat32": tfloat32,
    FLOAT8: float8_rows,
}


class Torch:
    """Arrays and times of torch."""

    products = ""
    """What products of float32 round their operands to."""

    def __init__(self, device: str, has_compiler: bool) -> None:
        import torch

        self.torch, self.device, self.has_compiler = torch, device, has_compiler
        self.generator = torch.Generator(device).manual_seed(0)

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        made = self.torch.randn(*shape, device=self.device, generator=self.generator)
        return made.to(getattr(self.torch, dtype))

    def wait(self, result: Any) -> None:
        del result
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def host(self, x: Any) -> Any:
        return x.detach().double().cpu().numpy()


class Jax:
    """Arrays and times of JAX."""

    def __init__(self) -> None:
        import jax

        self.jax, self.device = jax, jax.default_backend()
        self.products = "" if self.device == "cpu" else "tfloat32"
        self.rng = np.random.default_rng(0)

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        made = self.rng.standard_normal(shape, np.float32)
        return self.jax.numpy.asarray(made, dtype)

    def wait(self, result: Any) -> None:
        self.jax.block_until_ready(result)

    def host(self, x: Any) -> Any:
        return np.asarray(x, np.float64)


def microseconds(tools: Any, calls: dict[str, Call], seconds: float) -> dict[str, Any]:
    """Return the least mean time of each call over rounds, in which they take turns."""
    clock = time.process_time if tools.device == "cpu" else time.perf_counter
    counts, times = {}, dict.fromkeys(calls, np.inf)
    for name, call in calls.items():
        start = clock()
        tools.wait(call())
        counts[name] = max(int(seconds / ROUNDS / max(clock() - start, 1e-6)), 1)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = clock()
            for _ in range(counts[name]):
                result = call()
            tools.wait(result)
            times[name] = min(times[name], (clock() - start) / counts[name])
    return {name: each * 1e6 for name, each in times.items()}


def products(tools: Any, rows: tuple[int, ...]) -> Iterator[Case]:
    from inl.kernels import gemm

    def case(name: str, dtype: str, x: Any, y: Any, inputs: str, **fields: Any) -> Case:
        narrow = in_dtype(tools, "float16" if inputs == "float16" else "bfloat16")
        wide = in_dtype(tools, dtype)

        def narrowed(a: Any, b: Any) -> Any:
            return wide(narrow(a) @ narrow(b))

        others = plain(tools, narrowed if fields else lambda a, b: a @ b, x, y)
        return Case(
            name, "linear", dtype, lambda: gemm(x, y, **fields), others, np.matmul,
            (x, y), inputs, WIDTH,
        )  # fmt: skip

    b = tools.array(WIDTH, WIDTH)
    for count in rows:
        a = tools.array(count, WIDTH)
        yield case(f"gemm {count} rows", "float32", a, b, tools.products)
        for inputs, fields in ROUNDED.items():
            yield case(f"gemm {count} rows", "float32", a, b, inputs, **fields)
        x, y = (in_dtype(tools, "bfloat16")(each) for each in (a, b))
        yield case(f"gemm {count} rows", "bfloat16", x, y, "")


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
                inputs = tools.products if dtype == "float32" else ""
                yield Case(
                    f"attention {length} x {groups} heads, window {window}",
                    "attention", dtype, own, fused(tools, q, k, v, window),
                    lambda q, k, v, w=window: attend(q, k, v, w), (q, k, v), inputs,
                    length,
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


def attend(q: Any, k: Any, v: Any, window: int | None) -> Any:
    k, v = (each.repeat(q.shape[1] // each.shape[1], 1) for each in (k, v))
    at = np.arange(q.shape[2])
    far = at[:, None] - at
    seen = (far >= 0) & (far < (window or far.size))
    y = np.empty_like(q)
    for part in np.ndindex(q.shape[:2]):
        scores = np.where(seen, q[part] @ k[part].T * q.dtype.type(0.125), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y[part] = weights / weights.sum(-1, keepdims=True) @ v[part]
    return y


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

        yield Case(
            f"layer_norm {count} rows", "layer_norm", "float32",
            lambda x=x: layer_norm(x, w, b), others, normalized, (x, w, b),
        )  # fmt: skip


def normalized(x: Any, w: Any, b: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return (
        centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + 1e-5) * w + b
    )


def quantized(tools: Torch, rows: tuple[int, ...]) -> Iterator[Case]:
    from inl.optimizers import quantize_for_inference
    from inl_torch.registered.quantized import MAX_STORED

    torch = tools.torch
    layer = torch.nn.Linear(LAYER, LAYER, bias=False, device=tools.device)
    half = torch.nn.Linear(LAYER, LAYER, bias=False, device=tools.device).bfloat16()
    half.weight.data.copy_(layer.weight.data)
    for dtype in ("bf16", "fp8", "int8", "int4"):
        (small,) = quantize_for_inference(layer, dtype)
        weight = stored(small)
        for count in rows:
            is_float8 = dtype == "fp8" and tools.device == "cuda"
            inputs = (
                FLOAT8 if is_float8 and count > MAX_STORED[small.packed.dtype] else ""
            )
            x = tools.array(count, LAYER, dtype="bfloat16")
            yield Case(
                f"quantized {dtype} {count} rows", "linear", "bfloat16",
                torch.no_grad()(lambda x=x, s=small: s(x)),
                {"bf16": torch.no_grad()(lambda x=x: half(x))},
                lambda x, w=weight: x @ w.T.astype(x.dtype), (x,), inputs, LAYER,
            )  # fmt: skip


def stored(layer: Any) -> Any:
    """Return the weights [outputs, inputs] of a quantized layer in float64."""
    if layer.scale is None:
        return layer.packed.double().cpu().numpy()
    codes, scale = layer.packed.cpu(), layer.scale.double().cpu().numpy()
    if str(codes.dtype) == "torch.uint8":
        halves = codes.numpy().reshape(len(codes), -1, 16)
        values = np.concatenate([halves & 15, halves >> 4], -1).astype(np.float64) - 8
    else:
        values = codes.double().numpy()
    return (values.reshape(*scale.shape, -1) * scale[..., None]).reshape(len(scale), -1)


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
            f"dynamics {count} rows", "inl_dynamics", "float32",
            lambda x=given, f=own: f(*x),
            {n: lambda x=given, f=f: f(*x) for n, f in ways.items()}, formula,
            tuple(given),
        )  # fmt: skip
        if isinstance(tools, Torch):
            leaves = [each.clone().requires_grad_() for each in given]

            def train(f: Any, x: Any = leaves) -> Any:
                y, v = f(*x)
                return tools.torch.autograd.grad(y.sum() + v.sum(), x)

            yield Case(
                f"dynamics {count} rows, gradients", "inl_dynamics", "float32",
                lambda t=train: t(inl_dynamics),
                {n: lambda t=train, f=f: t(f) for n, f in ways.items()}, gradients,
                tuple(given),
            )  # fmt: skip


def gradients(x: Any, v: Any, m: Any, a: Any, b: Any, g: Any) -> tuple[Any, ...]:
    """Return those of the sum of both results."""
    tenth = x.dtype.type(0.1)
    pull = 1 + tenth * g
    velocity = a * v - b * (x - m)
    return 1 - b * pull, a * pull, b * pull, v * pull, (m - x) * pull, tenth * velocity


def judged(case: Case, result: tuple[Any, ...], runs: tuple[Any, Any]) -> Verdict:
    """Return the verdict on the worst of several results."""
    tolerance, verdicts = CATALOG[case.op].tolerance, []
    for found, exact, close in zip(result, *runs, strict=True):
        if found.shape != exact.shape:  # JAX has [B, L, H, d]
            found = found.swapaxes(1, 2)
        close = rounded(close.astype(np.float32), case.dtype)
        verdicts.append(
            judge_result(
                found, exact, close, case.dtype, tolerance=tolerance, terms=case.terms
            )
        )
    return max(verdicts, key=lambda each: each.error / max(each.bound, 1e-300))


def measure(tools: Any, case: Case, seconds: float) -> tuple[float, bool]:
    """Print the line of a case; return its ratio and whether its result passes."""
    start = time.perf_counter()
    result = case.own()
    tools.wait(result)
    first = time.perf_counter() - start
    wide = [tools.host(each) for each in case.operands]
    narrow = [NARROW[case.inputs](each.astype(np.float32)) for each in wide]
    runs = several(case.body(*wide)), several(case.body(*narrow))

    def verdict(result: Any) -> Verdict:
        return judged(case, tuple(map(tools.host, several(result))), runs)

    own = verdict(result)
    others, refused = dict(case.others), []
    less_exact = []
    for name, call in case.others.items():
        try:
            is_exact = verdict(call()).passed
        except Exception as error:  # a way of the framework that its device lacks
            del others[name]
            refused.append(f"{name} is refused: {str(error).partition(chr(10))[0]:.80}")
        else:
            less_exact += [] if is_exact else [name]
    times = microseconds(tools, {"INL": case.own, **others}, seconds)
    mine = times.pop("INL")
    equal = {name: each for name, each in times.items() if name not in less_exact}
    best = min(equal, key=equal.__getitem__, default="none")
    ratio = equal.get(best, np.inf) / mine
    notes = [f"{name} is less exact: {times[name]:.1f}" for name in less_exact]
    notes += refused
    if not own.passed:
        notes.append(f"WRONG: {own}")
    print(
        f"{case.name:40} {case.dtype:9} {case.inputs:13} {mine:10.1f} "
        f"{equal.get(best, np.inf):10.1f} {best:8} {ratio:6.2f}  "
        f"{own.error:.1e} {own.bound:.1e} {first:6.2f} s  {'; '.join(notes)}".rstrip(),
        flush=True,
    )
    return ratio, own.passed


def several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


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
                print(f"{case.name:40} {case.dtype:9} FAILED {error!r:.300}")
    wrong = sum(not good for _, good in found)
    slow = sum(ratio < 0.95 for ratio, _ in found)
    print(f"{len(found)} cases, {slow} below 0.95, {wrong} wrong, {len(failed)} failed")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
