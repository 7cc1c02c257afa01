"""Searches the block sizes of Pallas kernels for a TPU without one; prints a table.

Usage: tpu_tune.py [TOPOLOGY] [--only TEXT] [--seconds N] [--write], with libtpu: pip
install 'inl-tpu[compiler]'. ``--write`` stores the fastest sizes in the table that the
kernels read (``inl_jax.pallas.block_sizes``), for the chip and the searched shapes.

The time of a candidate is that of its cycles by bundles or of its transfers between HBM
and VMEM, whichever is longer. Candidates that the compiler refuses, or that spill too
often, are listed with the reason. The first one has the sizes of the kernel's own rule,
which are kept unless others are faster by 2 %; a shape whose candidates were not all
tried is not stored. Where there is a TPU, ``inl tune``
measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from jax.experimental import pallas as pl
from tpu_kernels import Launch, attended, plain, product, routed
from tpu_roofline import CHIPS, compiled

from inl_jax.pallas import block_sizes, dense, matmul, packed, paged_attention

TABLE = Path(block_sizes.__file__).with_name(block_sizes.FILE)

FASTER = 0.98
"""Sizes replace those of the rule below this ratio of the times."""

INFINITE = float("inf")

Sizes = Mapping[str, int]


class Search(NamedTuple):
    """One kernel and shape."""

    make: Callable[[], Launch]
    candidates: list[dict[str, int]]
    traffic: Callable[[Sizes], int]
    """Bytes between HBM and VMEM with some sizes."""


class Found(NamedTuple):
    """What the compiler says about a candidate."""

    seconds: float
    sizes: Sizes
    problem: str


def products(
    tokens: int, inputs: int, outputs: int, kind: str, *, offsets: bool = False
) -> Search:
    """Blocks of rows and outputs of packed products."""
    size = packed.padded_inputs(inputs)
    halves = offsets + ("int" in kind)
    stored = size * outputs * (4 if kind == "int4" else 8) // 8
    stored += halves * size * outputs // 16
    few = tokens <= matmul.FEW_ROWS

    def traffic(sizes: Sizes) -> int:
        blocks = matmul.blocks_of(tokens, size, outputs, sizes)
        again = pl.cdiv(outputs, blocks.outputs)
        return stored + 2 * again * tokens * size + 2 * tokens * outputs

    wide = (256, 512, 1024, 2048)
    if few:
        candidates = [{"outputs": n} for n in wide if n < 2 * outputs]
    else:
        pairs = itertools.product((256, 512, 1024), wide[:3])
        candidates = [{"rows": m, "outputs": n} for m, n in pairs if n < 2 * outputs]
    return Search(
        partial(product, tokens, inputs, outputs, kind, offsets=offsets),
        candidates,
        traffic,
    )


def dense_products(tokens: int, inputs: int, outputs: int) -> Search:
    """Blocks of rows, outputs and inputs of plain products of many rows."""

    def traffic(sizes: Sizes) -> int:
        blocks = dense.blocks_of(tokens, inputs, outputs, sizes)
        wide, tall = pl.cdiv(outputs, blocks.outputs), pl.cdiv(tokens, blocks.rows)
        weights = inputs * outputs * (tall if blocks.inputs < inputs else 1)
        return 2 * (wide * tokens * inputs + weights + tokens * outputs)

    sizes = itertools.product((1024, 2048), (512, 1024, 2048), (512, 1024, 2048))
    names = ("rows", "outputs", "inputs")
    return Search(
        partial(plain, tokens, inputs, outputs),
        [dict(zip(names, each, strict=True)) for each in sizes],
        traffic,
    )


def attentions(
    heads: int, kv_heads: int, dim: int, tokens: int, rows: int, context: int,
    kv_dtype: str = "bfloat16",
) -> Search:  # fmt: skip
    """Keys of a chunk, and queries of a block of scores."""
    cell = (1 if kv_dtype == "int8" else 2) * 2 * kv_heads * dim
    each, tile = tokens // rows, paged_attention.TILE
    read = sum(context - each + min(i + tile, each) for i in range(0, each, tile))
    moved = rows * read * cell + 4 * tokens * heads * dim
    if each == 1:
        candidates = [{"keys": keys} for keys in (128, 256, 1024)]
    else:
        pairs = itertools.product((128, 256, 512), (256, 512, 1024))
        candidates = [{"keys": keys, "columns": wide} for keys, wide in pairs]
    return Search(
        partial(
            attended, heads, kv_heads, dim, tokens, rows, context, kv_dtype=kv_dtype
        ),
        candidates,
        lambda _: moved,
    )


def of_experts(tokens: int, k: int, count: int, inputs: int, outputs: int) -> Search:
    """Bytes of a block of a matrix."""
    moved = 2 * min(count, tokens * k) * inputs * outputs
    return Search(
        partial(routed, tokens, k, count, inputs, outputs),
        [{"bytes": size << 20} for size in (1, 2, 8)],
        lambda _: moved,
    )


SEARCHES = {
    "8B prompt up int8": products(2048, 4096, 14336, "int8"),
    "8B prompt up int4": products(2048, 4096, 14336, "int4"),
    "8B prompt down int8": products(2048, 14336, 4096, "int8"),
    "135M prompt up int8": products(2048, 576, 1536, "int8"),
    "8B decode up int8": products(32, 4096, 14336, "int8"),
    "8B decode up int4": products(32, 4096, 14336, "int4"),
    "8B decode up int4 offsets": products(32, 4096, 14336, "int4", offsets=True),
    "8B decode down int8": products(32, 14336, 4096, "int8"),
    "8B prompt down": dense_products(2048, 14336, 4096),
    "8B prompt attention": attentions(32, 8, 128, 2048, 1, 2048),
    "135M prompt attention": attentions(9, 3, 64, 2048, 1, 2048),
    "8B decode attention": attentions(32, 8, 128, 64, 64, 4096),
    "8B decode attention int8": attentions(32, 8, 128, 64, 64, 4096, "int8"),
    "135M decode attention": attentions(9, 3, 64, 32, 32, 2048),
    "8x7B decode experts": of_experts(4, 2, 8, 4096, 14336),
}


def tried(
    topology: str, name: str, deadline: float, folder: Path
) -> tuple[tuple[str, str], list[Found]]:
    """Compile the candidates of a search until a deadline.

    Returns kernel and shape, as the kernel names them, and the results; the rule's
    own sizes first.
    """
    chip, search = CHIPS[topology.partition(":")[0]], SEARCHES[name]
    asked: set[tuple[str, str]] = set()
    results: list[Found] = []
    for sizes in ({}, *search.candidates):
        if results and time.monotonic() > deadline:
            print(f"{topology} {name}: the time is over")
            break

        def answer(kernel: str, shape: str, sizes: Sizes = sizes) -> Sizes:
            asked.add((kernel, shape))
            return sizes

        with patch.object(block_sizes, "searched", answer):
            launch = search.make()
            # JAX would not trace the same function again.
            again = launch._replace(run=lambda *args, run=launch.run: run(*args))
            (row,) = compiled(topology, {name: again}, folder)
        took = max(row.cycles / chip.clock, search.traffic(sizes) / chip.bandwidth)
        problem = row.problem or ("" if row.cycles else "loops are not known")
        results.append(Found(INFINITE if problem else took, sizes, problem))
    (key,) = asked
    return key, results


def entry(results: list[Found]) -> dict[str, object]:
    """Return what the table says about a searched shape."""
    rule, best = results[0], min(results, key=lambda each: each.seconds)
    if best.seconds >= FASTER * rule.seconds:
        best = rule
    times = {"us": best.seconds, "rule us": rule.seconds}
    return {
        "sizes": dict(best.sizes),
        **{k: round(1e6 * v, 1) for k, v in times.items() if v < INFINITE},
    }


def store(topology: str, found: Mapping[tuple[str, str], dict[str, object]]) -> None:
    """Merge the results of a chip into the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    chip = topology.partition(":")[0].removeprefix("tpu")
    for (kernel, shape), value in found.items():
        table.setdefault(chip, {}).setdefault(kernel, {})[shape] = value
    text = json.dumps(table, indent=1, sort_keys=True)
    TABLE.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology", nargs="?", default="v6e:2x2")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    with TemporaryDirectory(prefix="tpu-tune-") as folder:
        for name in SEARCHES:
            if options.only not in name or time.monotonic() > deadline:
                continue
            key, results = tried(options.topology, name, deadline, Path(folder))
            for took, sizes, problem in sorted(results, key=lambda each: each.seconds):
                shown = sizes or "rule"
                print(
                    f"{options.topology} {name:<26} {1e6 * took:9.1f} us  {shown} "
                    f"{problem[:90]}",
                    flush=True,
                )
            if options.write and len(results) == 1 + len(SEARCHES[name].candidates):
                store(options.topology, {key: entry(results)})


if __name__ == "__main__":
    main()
