"""Compiles the Pallas kernels for a TPU without one, and prints a roofline table.

Usage: tpu_roofline.py [TOPOLOGY] [--only TEXT] [--plant vmem|spills|mosaic] [--json]
[--uncounted], with libtpu: pip install 'inl-tpu[compiler]'. Exits with 1 if a kernel is
refused or spills too often; it is named. ``--uncounted`` compiles only, in a third of
the time: all counts are 0, and spills are not found.

The cycles are instruction bundles times the runs of their loops, without waits. The
share is the time that the bytes and operations need, divided by the larger of this time
and that of the cycles: a bound on what the kernel can reach, not a measurement. Cycles
and shares are 0 where the compiler added loops of which the runs are not known.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
import tpu_bundles
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpu_kernels import Launch, launches, planted

MOST_SPILLS = 0.6
"""Spilled registers per bundle at a depth of loops. Mosaic unrolls a product of many
rows, and spills sums between its parts, in up to half of the bundles."""


class Chip(NamedTuple):
    """Published peaks of a chip, for one core."""

    bandwidth: float
    flops: float
    clock: float


CHIPS = {
    "v5e": Chip(819e9, 197e12, 1.5e9),
    "v5p": Chip(2765e9 / 2, 459e12 / 2, 1.75e9),
    "v6e": Chip(1640e9, 918e12, 1.75e9),
    "tpu7x": Chip(7370e9 / 2, 2307e12 / 2, 1.75e9),
}
"""The clock of TPU7x is not published: that of v6e."""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    kernel: str
    vmem: int
    bundles: int
    spills: int
    cycles: int
    bytes_share: float
    flops_share: float
    problem: str = ""


def compiled(
    topology: str, chosen: dict[str, Launch], folder: Path | None
) -> Iterator[Row]:
    """Compile each launch for one chip of a topology.

    folder: for what the compiler writes; ``None`` for no counts.
    """
    if folder:
        tpu_bundles.dump_to(folder)
    chip = CHIPS[topology.partition(":")[0]]
    with one_chip(topology) as spec:
        for name, launch in chosen.items():
            arguments = jax.tree.map(
                lambda leaf: spec(*leaf), launch.shapes, is_leaf=is_spec
            )
            yield row(name, launch, arguments, chip, folder)


@contextmanager
def one_chip(topology: str) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes specs on one chip of a topology."""
    # libtpu reads these when it is first used.
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        # Without a TPU, processes need not take turns.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = Mesh(np.array(devices.devices[:1]), ("chip",))
    place = NamedSharding(mesh, PartitionSpec())

    def spec(shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield spec


def is_spec(leaf: Any) -> bool:
    """Whether a leaf is a pair of shape and dtype."""
    return type(leaf) is tuple and len(leaf) == 2 and isinstance(leaf[1], str)


def row(
    name: str, launch: Launch, arguments: Any, chip: Chip, folder: Path | None
) -> Row:
    """Compile one launch and read what the compiler wrote about it."""
    try:
        traced = jax.jit(launch.run).trace(*arguments)
        traced.lower(lowering_platforms=("tpu",)).compile()
        if folder is None:
            return Row(name, launch.kernel, 0, 0, 0, 0, 0, 0)
        facts = tpu_bundles.facts_of(folder, launch.kernel)
        cycles = facts.cycles(launch.runs, launch.loops)
    except Exception as error:  # the compiler's and Mosaic's are of any type
        reason = " ".join(str(error).split())[:500]
        return Row(name, launch.kernel, 0, 0, 0, 0, 0, 0, f"refused: {reason}")
    needs = launch.nbytes / chip.bandwidth, launch.flops / chip.flops
    took = max(*needs, cycles / chip.clock)
    worst = max(s / b for s, b in zip(facts.spills, facts.bundles, strict=True) if b)
    problem = f"spills {worst:.2f} registers per bundle" if worst > MOST_SPILLS else ""
    total, spills = sum(facts.bundles), sum(facts.spills)
    shares = (need / took if cycles else 0.0 for need in needs)
    return Row(name, launch.kernel, facts.vmem, total, spills, cycles, *shares, problem)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology", nargs="?", default="v6e:2x2")
    parser.add_argument("--only", default="")
    parser.add_argument("--plant", choices=("vmem", "spills", "mosaic"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--uncounted", action="store_true")
    options = parser.parse_args()
    chosen = launches(options.topology, options.only)
    if options.plant:
        chosen = {"planted": planted(options.plant)}
    with TemporaryDirectory(prefix="tpu-bundles-") as folder:
        written = None if options.uncounted else Path(folder)
        rows = list(compiled(options.topology, chosen, written))
    if options.json:
        print(json.dumps([each._asdict() for each in rows]))
    else:
        table(rows, options.topology)
    return int(any(each.problem for each in rows))


def table(rows: list[Row], topology: str) -> None:
    """Print the rows for people."""
    heads = ("VMEM KiB", "bundles", "spills", "cycles", "of bandwidth", "of FLOPs")
    print(f"{topology:<26}" + "".join(f"{head:>13}" for head in heads))
    for each in rows:
        numbers = (
            f"{each.vmem >> 10:13}{each.bundles:13}{each.spills:13}{each.cycles:13}"
        )
        shares = f"{each.bytes_share:13.2f}{each.flops_share:13.2f}"
        print(f"{each.name:<26}{numbers}{shares}  {each.kernel} {each.problem}")


if __name__ == "__main__":
    sys.exit(main())
