"""Twelve wrong kernels, for NumPy arrays and for JAX, and checks of a backend with one.

A fault takes ``(xp, run)``, the array module and a correct kernel, and returns a wrong
kernel.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inl.device import Device
from inl.spec.kernel import Kernel
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.findings import findings
from inl.testing.target import Target


class Planted(NamedTuple):
    """A fault, the ops to check and the dtype of the backend."""

    op: str
    wrong: object
    """(xp, run) -> kernel; ``None`` for a kernel that is not listed."""
    only: tuple[str, ...] = ()
    """Ops to check; by default ``op``."""
    name: str = ""
    """Op of the kernel, if it is not ``op``."""
    dtype: str = "float32"
    section: str = "kernel"


def of_dtype(dtype):
    def plant(xp, run):
        return lambda *args, **attrs: xp.astype(run(*args, **attrs), dtype)

    return plant


def wide_ids(xp, run):
    def route(logits, **attrs):
        ids, weights = run(logits, **attrs)
        return xp.astype(ids, "int64"), weights

    return route


def transposed(_xp, run):
    return lambda x, w: run(x, w).T


def short_context(xp, run):
    def attention(q, cache, step, **attrs):
        out = run(q, cache, step, **attrs)
        return xp.where((step.positions > 99)[:, None, None], 1.01 * out, out)

    return attention


def one_tile(xp, run):
    def linear(x, w):
        y = run(x, w)
        return xp.where((xp.arange(y.shape[0]) < 64)[:, None], y, 0 * y)

    return linear


def raises(_xp, _run):
    def rope(q, k, cos, sin):
        raise ValueError("boom")

    return rope


def divided(_xp, run):
    def rms_norm(x, w, *, eps):
        with np.errstate(all="ignore"):
            return run(x, w, eps=eps) + 0 / (x * x).mean(-1, keepdims=True)

    return rms_norm


def exchanged(_xp, run):
    return lambda gate, up, **attrs: run(up, gate, **attrs)


def narrow_sums(xp, _run):
    def linear(x, w):
        y = xp.round_half(xp.zeros((x.shape[0], w.weight.shape[0]), "float32"))
        for k in range(0, x.shape[-1], 8):
            part = x[:, k : k + 8] @ w.weight[:, k : k + 8].T
            y = xp.round_half(y + part)
        return y if w.bias is None else xp.round_half(y + w.bias)

    return linear


PLANTED = {
    "float64": Planted("rms_norm", of_dtype("float64")),
    "int64": Planted("route", wide_ids),
    "float16": Planted("gated_activation", of_dtype("float16")),
    "shape": Planted("linear", transposed),
    "position 99": Planted("attention", short_context),
    "64 rows": Planted("linear", one_tile),
    "raises": Planted("rope", raises),
    "misspelt": Planted(
        "rms_norm", lambda _xp, run: run, name="rms_nrom", section="backend"
    ),
    "NaN": Planted("rms_norm", divided),
    "composites": Planted(
        "gated_activation", exchanged, ("norm_mlp", "gated_mlp", "gated_activation")
    ),
    "missing": Planted(
        "rms_norm", None, ("norm_qkv", "reduce_add_norm", "rms_norm", "add_norm")
    ),
    "bfloat16": Planted("linear", narrow_sums, dtype="bfloat16"),
}


def planted_kernels(fault, xp, run_of, ops):
    """Yield the kernels of ``ops``, correct but for one fault."""
    planted = PLANTED[fault]
    for name in ops:
        run = run_of(name)
        if name != planted.op:
            yield Kernel(name, xp.label, run)
        elif planted.wrong is not None:
            wrong = xp.compiled(planted.wrong(xp, run))
            yield Kernel(planted.name or name, xp.label, wrong)


def report(make, fault, device="planted:0", seed=None, only=None):
    """Return the lines that ``inl check`` prints for a backend with one fault."""
    planted = PLANTED[fault]
    chosen = {} if seed is None else {"seed": seed}
    only = planted.only or (planted.op,) if only is None else only
    target = Target(Device(device), only=only, **chosen)
    # The registry has no such device: the target uses this backend.
    target.__dict__["backend"] = make(fault, planted.dtype)(target.device)
    checks = checks_of(target, [planted.section])
    if planted.section == "backend":
        checks = [check for check in checks if check.name == "backend/kernels"]
    results = [perform(check, {}) for check in checks]
    return [line for finding in findings(results) for line in finding.lines()]


PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def quotations():
    """List (heading, quoted report) of each section of docs/troubleshooting.md."""
    return re.findall(r"^### (.+?)\n\n```\n(.*?)```\n", PAGE.read_text(), re.M | re.S)


def matches(quoted, lines):
    """Compare a quotation with a report: ``...`` stands for any text of a line."""
    patterns = [
        ".*".join(map(re.escape, line.split("..."))) for line in quoted.splitlines()
    ]
    pairs = zip(patterns, lines, strict=False)
    same = all(re.fullmatch(pattern, line) for pattern, line in pairs)
    return same and len(patterns) == len(lines)


class NumPy:
    """NumPy under the names that faults use."""

    label = "numpy"
    arange, where, zeros = np.arange, np.where, np.zeros

    @staticmethod
    def astype(x, dtype):
        return np.asarray(x).astype(dtype)

    @staticmethod
    def compiled(run):
        return run

    @staticmethod
    def round_half(x):
        from inl.dtypes import rounded

        return rounded(x, "bfloat16")


def eager_backend(fault, dtype="float32"):
    """Return a NumPy backend with one fault."""
    from inl.backend.base import Traits
    from inl.backend.reference import body_kernel
    from inl.dtypes import widen, wrap
    from inl.ops import catalog
    from inl.plugin import simple_backend

    def tensor(host):
        values = widen(host)
        float_like = values.dtype.kind == "f"
        return np.array(values, np.float32 if float_like else values.dtype)

    def run_of(name):
        return body_kernel(catalog()[name], dtype)

    primitives = [name for name, op in catalog().items() if not op.composite]
    return simple_backend(
        tensor=tensor,
        numpy=wrap,
        kernels=partial(planted_kernels, fault, NumPy, run_of, primitives),
        traits=Traits(dtypes=(dtype,), block_size=8),
    )
