"""Times of all Triton kernels against torch, torch.compile, cuBLAS and a ceiling.

    python bench/cuda_kernels.py [--rows attend norm] [--json FILE] [--plot FILE.png]

Each implementation is captured in a graph over several sets of inputs, larger than the
last cache, and timed by device events; medians. Host time is not counted, which favors
plain torch. The ceiling is the time to move the call's bytes at the speed of a copy, or
to compute its operations at the speed of a bfloat16 matrix product, whichever is
larger; both speeds are measured in the same run. Exits with 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels.picture import check_picture, draw
from kernels.rows import Row
from kernels.table import ROWS

from inl.backend.tunable import Tunable
from inl.device import Device
from inl.spec.dispatch import DynamicOps
from inl.spec.tree import leaves, tree_map
from inl_cuda.backend import CudaBackend

MOST_SETS = 64
MOST_BYTES = 8 << 30
WRONG = 0.02
"""Relative error from float32 beyond that of bfloat16 rounding."""


@dataclass
class Line:
    """Measurements of one row: seconds, or ``None`` where an implementation is
    skipped."""

    op: str
    shape: str
    ours: float | None
    plain: float | None
    compiled: float | None
    library: float | None
    ceiling: float
    rate: str
    error: float | None
    said: str = ""


class Bench:
    """One GPU, its measured ceilings and its kernels."""

    def __init__(self, compile_seconds: float) -> None:
        self.backend = CudaBackend(Device("cuda:0"))
        self.tuner = self.backend.offers(Tunable)
        kernels = tuple(self.backend.kernels())
        # Of two kernels, the one that also computes what the library is faster at.
        self.kernels = {
            kernel.op: kernel.run
            for name in ("triton", "triton+eager")
            for kernel in kernels
            if kernel.name == name
        }
        ops = DynamicOps(kernels)
        for op in ("attend_project", "attention"):
            self.kernels[op] = getattr(ops, op)
        self.copies, self.products = copy_rate(), product_rate()
        self._deadline = time.monotonic() + compile_seconds
        self.compile_left_out = 0

    def line(self, row: Row) -> Line:
        first = row.make()
        size = row.nbytes(first)
        held = sum(t.nbytes for t in leaves(first) if isinstance(t, torch.Tensor))
        count = -(-3 * self.tuner.cache_bytes // (2 * min(size, held)))
        count = min(max(count, 2), MOST_SETS, max(MOST_BYTES // held, 2))
        sets = [first, *(row.make() for _ in range(count - 1))]
        moving, computing = size / self.copies, row.flops / self.products
        ceiling = max(moving, computing)
        said: list[str] = []
        ours = partial(row.ours, self.kernels[row.op])
        found = Line(
            row.op, row.shape, self.time("ours", ours, sets, said),
            self.time("plain", row.plain, sets, said),
            self.compiled(row, sets, said),
            self.time("library", row.library, sets, said), ceiling, "", None,
        )  # fmt: skip
        if found.ours:
            found.rate = (
                f"{row.flops / found.ours / 1e12:.0f} TFLOP/s"
                if computing > moving
                else f"{size / found.ours / 1e9:.0f} GB/s"
            )
            found.error = distance(row, ours, first) if row.exact else None
        found.said = "; ".join(said)
        return found

    def time(self, name: str, way: Any, sets: Any, said: list[str]) -> float | None:
        if way is None:
            return None
        try:
            calls = [partial(way, *inputs) for inputs in sets]
            return self.tuner.seconds(self.backend, calls)
        except Exception as error:
            said.append(f"{name}: {type(error).__name__}: {str(error)[:100]}")
            return None

    def compiled(self, row: Row, sets: Any, said: list[str]) -> float | None:
        if time.monotonic() > self._deadline:
            self.compile_left_out += 1
            return None
        torch._dynamo.reset()
        way = torch.compile(row.plain, dynamic=False)
        return self.time("compiled", way, sets, said)


def distance(row: Row, ours: Any, inputs: Any) -> float:
    """Relative error of the kernel's result from plain torch in float32."""

    def wide(leaf: Any) -> Any:
        return leaf.float() if leaf.dtype == torch.bfloat16 else leaf.clone()

    with torch.inference_mode():
        got = leaves(ours(*inputs))
        exact = leaves(row.plain(*tree_map(wide, inputs)))
        return max(
            float((g.float() - e.float()).norm() / e.float().norm().clamp(min=1e-9))
            for g, e in zip(got, exact, strict=True)
        )


def timed(work: Any, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(count):
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(1e-3 * begin.elapsed_time(end))
    return statistics.median(found[count // 3 :])


def copy_rate() -> float:
    """Bytes per second, read plus written, of a copy on the device."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 15)


def product_rate(size: int = 8192) -> float:
    """Operations per second of a square bfloat16 matrix product."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * size**3 / timed(lambda: torch.mm(a, b, out=out), 15)


def cells(line: Line) -> list[str]:
    def us(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.2f}"

    others = [line.plain, line.compiled, line.library]
    known = [seconds for seconds in others if seconds]
    ahead = min(known) / line.ours if known and line.ours else None
    return [
        line.op, line.shape, us(line.ours), line.rate,
        f"{line.ceiling / line.ours:.0%}" if line.ours else "-",
        *map(us, others),
        "-" if ahead is None else f"{ahead:.2f}" + (" LOSES" if ahead < 1 else ""),
        "-" if line.error is None else f"{line.error:.4f}", line.said,
    ]  # fmt: skip


HEADS = [
    "kernel", "shape", "us", "rate", "of ceiling", "torch us", "compile us",
    "library us", "best other / ours", "error", "",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of op names")
    parser.add_argument("--compile-seconds", type=float, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.plot:
        check_picture(given.plot)
    bench = Bench(given.compile_seconds)
    title = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies "
        f"{bench.copies / 1e12:.2f} TB/s, bfloat16 products "
        f"{bench.products / 1e12:.0f} TFLOP/s"
    )
    print(f"{title}\n{' | '.join(HEADS)}", flush=True)
    lines = []
    for row in ROWS:
        if any(part in row.op for part in given.rows):
            lines.append(bench.line(row))
            print(" | ".join(cells(lines[-1])), flush=True)
            torch.cuda.empty_cache()
    if bench.compile_left_out:
        print(
            f"torch.compile was left out of {bench.compile_left_out} rows: out of time"
        )
    if given.json:
        measured = {
            "device": title, "copy_bytes_per_second": bench.copies,
            "product_flops": bench.products, "rows": [asdict(line) for line in lines],
        }  # fmt: skip
        given.json.write_text(json.dumps(measured, indent=1))
    if given.plot:
        draw(lines, given.plot, title)
    wrong = [line for line in lines if not (line.error or 0) <= WRONG]
    failed = [line for line in lines if line.ours is None]
    for line in wrong + failed:
        print(f"wrong: {line.op} {line.shape}: error {line.error} {line.said}")
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
