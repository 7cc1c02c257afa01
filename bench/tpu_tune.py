"""Searches the block sizes of Pallas kernels for a TPU without one; prints a table.

Usage: tpu_tune.py [TOPOLOGY] [--only TEXT] [--seconds N], with libtpu: pip install
'inl-tpu[compiler]'. The fastest sizes belong in ``inl_jax.pallas.block_sizes``.

The time of a candidate is that of its cycles by bundles or of its transfers between HBM
and VMEM, whichever is longer. Candidates that the compiler refuses, or that spill too
often, are listed with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

from jax.experimental import pallas as pl
from tpu_kernels import Launch, attended, product, routed
from tpu_roofline import CHIPS, compiled

from inl_jax.pallas import attention_tile, experts, matmul, paged_attention


class Candidate(NamedTuple):
    """Block sizes of one kernel and shape."""

    sizes: dict[str, int]
    replaced: list[tuple[Any, str, Any]]
    """Module, name and value."""
    traffic: int
    """Bytes between HBM and VMEM."""


def products(tokens: int, inputs: int, outputs: int, kind: str) -> Iterator[Candidate]:
    """Blocks of rows and outputs of packed products of prompts."""
    known = matmul.blocks_of(tokens, inputs, outputs)
    for rows, wide in itertools.product((256, 512, 1024), (256, 512, 1024)):
        blocks = known._replace(rows=min(rows, tokens), outputs=wide)
        again = pl.cdiv(outputs, wide)
        bits = 4 if kind == "int4" else 8
        moved = again * 2 * tokens * inputs + inputs * outputs * bits // 8
        yield Candidate(
            {"rows": blocks.rows, "outputs": wide},
            [(matmul, "blocks_of", lambda *_, blocks=blocks: blocks)],
            moved + inputs * outputs // 16 + 2 * tokens * outputs,
        )


def prompts(tokens: int, heads: int, kv_heads: int, dim: int) -> Iterator[Candidate]:
    """Tokens of a tile, keys of a chunk and queries of a block of scores."""
    for tile, keys, wide in itertools.product((128, 256), (256, 512), (256, 512)):
        tiles = paged_attention.TILES | {"most": tile}
        read = sum(i + tile for i in range(0, tokens, tile))
        yield Candidate(
            {"tokens": tile, "keys": keys, "queries": wide},
            [
                (paged_attention, "TILE", tile),
                (paged_attention, "TILES", tiles),
                (paged_attention, "PROMPT_KEYS", keys),
                (paged_attention, "COLUMNS", wide),
                (attention_tile, "COLUMNS", wide),
            ],
            4 * read * kv_heads * dim + 4 * tokens * heads * dim,
        )


def decoding(rows: int, context: int, kv_heads: int, dim: int) -> Iterator[Candidate]:
    """Keys of a chunk of decoding rows."""
    for keys in (256, 512, 1024):
        moved = 4 * rows * context * kv_heads * dim
        yield Candidate({"keys": keys}, [(paged_attention, "KEYS", keys)], moved)


def of_experts(count: int, inputs: int, outputs: int) -> Iterator[Candidate]:
    """Bytes of a block of a matrix."""
    for size in (2 << 20, 4 << 20, 8 << 20):
        moved = 2 * count * inputs * outputs
        yield Candidate({"bytes": size}, [(experts, "MATRIX_BYTES", size)], moved)


SEARCHES = {
    "8B prompt up int8": (product, (2048, 4096, 14336, "int8"), products,
                          (2048, 4096, 14336, "int8")),
    "8B prompt down int8": (product, (2048, 14336, 4096, "int8"), products,
                            (2048, 14336, 4096, "int8")),
    "135M prompt up int8": (product, (2048, 576, 1536, "int8"), products,
                            (2048, 640, 1536, "int8")),
    "8B prompt attention": (attended, (32, 8, 128, 2048, 1, 2048), prompts,
                            (2048, 32, 8, 128)),
    "135M prompt attention": (attended, (9, 3, 64, 2048, 1, 2048), prompts,
                              (2048, 9, 3, 64)),
    "8B decode attention": (attended, (32, 8, 128, 64, 64, 4096), decoding,
                            (64, 4096, 8, 128)),
    "135M decode attention": (attended, (9, 3, 64, 32, 32, 2048), decoding,
                              (32, 2048, 3, 64)),
    "8x7B decode experts": (routed, (4, 2, 8, 4096, 14336), of_experts,
                            (8, 4096, 14336)),
}  # fmt: skip


def search(topology: str, name: str, deadline: float, folder: Path) -> None:
    """Print the candidates of one kernel and shape, the fastest one first."""
    chip = CHIPS[topology.partition(":")[0]]
    make, shape, candidates, sizes = SEARCHES[name]
    results: list[tuple[float, dict[str, int], str]] = []
    for each in candidates(*sizes):
        if time.monotonic() > deadline:
            print(f"{name}: the time is over")
            break
        with ExitStack() as stack:
            for module, attribute, value in each.replaced:
                stack.enter_context(patch.object(module, attribute, value))
            launch: Launch = make(*shape)
            # JAX would not trace the same function again.
            again = launch._replace(run=lambda *args, run=launch.run: run(*args))
            (row,) = compiled(topology, {name: again}, folder)
        took = max(row.cycles / chip.clock, each.traffic / chip.bandwidth)
        reason = row.problem or ("" if row.cycles else "loops are not known")
        results.append((float("inf") if reason else took, each.sizes, reason))
    for took, found, reason in sorted(results, key=lambda result: result[0]):
        print(f"{topology} {name:<24} {1e6 * took:9.1f} us  {found} {reason[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology", nargs="?", default="v6e:2x2")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    with TemporaryDirectory(prefix="tpu-tune-") as folder:
        for name in SEARCHES:
            if options.only in name:
                search(options.topology, name, deadline, Path(folder))


if __name__ == "__main__":
    main()
