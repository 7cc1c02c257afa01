"""Whole steps of the 8B shape on a TPU that is not here: their share of its limits.

Usage: tpu_step_roofline.py [TOPOLOGY] [--steps prefill decode], with libtpu:
pip install 'inl-tpu[compiler]'.

The cycles of a layer are those that XLA estimates for its instructions in a program of
one layer more, and those of the Pallas kernels by bundles (``tpu_roofline.py``), as if
nothing ran beside them. Weights and cache are in bfloat16. A bound, not a measurement.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tpu_kernels import launches
from tpu_roofline import CHIPS, compiled, one_chip

from inl.executor.model_step import advance
from inl.executor.tracing import trace
from inl.models.llama import MODEL
from inl.spec.dispatch import ResolvedOps
from inl.spec.limits import Limits
from inl.spec.message import layout
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.tree import tree_map
from inl.tune.models import SHAPES
from inl.weights.plan import plan_weights
from inl_jax import pallas, xla
from inl_jax.pages import paged_state
from inl_jax.programs import jitted

SHAPE = SHAPES["8b"]
LAYERS = SHAPE["num_hidden_layers"]
UNKNOWN = 1 << 60
"""XLA's estimate of instructions that it has none of."""


class StepShape(NamedTuple):
    """One kind of step."""

    tokens: int
    rows: int
    context: int
    kernels: dict[str, str]
    """Pallas kernel -> its name among the launches of ``tpu_kernels.py``."""


STEPS = {
    "prefill": StepShape(2048, 1, 2048, {
        "ragged_paged_attention": "8B prefill attention",
        "write_kv": "8B prefill write",
        "reduce_add_norm": "8B prefill norm",
        "gated_matmul": "8B prefill gate and up",
        "dense_matmul": "8B prefill down",
        "rope_q": "8B prefill rope queries",
        "rope_k": "8B prefill rope keys",
    }),
    "decode": StepShape(64, 64, 4096, {
        "ragged_paged_attention": "8B decode attention",
        "write_kv": "8B decode write",
        "reduce_add_norm": "8B decode norm",
    }),
}  # fmt: skip


def program(spec: Callable[..., Any], step: StepShape, layers: int) -> str:
    """Compile a step of some layers; returns its HLO."""
    config = MODEL.config({**SHAPE, "num_hidden_layers": layers})
    config = replace(config, dtype="bfloat16")
    limits = Limits(
        step.rows + 1, (1021,), 32, 256, SHAPE["vocab_size"], sampler="greedy"
    )
    bucket = Bucket(step.tokens, step.rows)
    selection = KernelSelection((*xla.KERNELS, *pallas.kernels()))
    groups = plan_weights(MODEL.weights(config), selection.kernels, {})
    traced = trace(MODEL, config, groups, bucket, limits, selection)
    weights = tree_map(
        lambda x: spec(x.shape, x.dtype),
        tree_map(lambda plan: plan.specs("bfloat16"), groups),
    )
    words = layout(bucket, groups=1, block_size=limits.block_size).size
    body = partial(advance, ResolvedOps(traced).at(bucket), MODEL, config)
    state = paged_state(MODEL.state(config), limits, spec)
    lowered = (
        jitted(body, (2,))
        .trace(weights, spec((words,), "int32"), state)
        .lower(lowering_platforms=("tpu",))
    )
    return str(lowered.compile().as_text())


def estimates(text: str) -> tuple[int, Counter[str]]:
    """Return XLA's cycles of a program, and the runs of each Pallas kernel."""
    entry = text[text.index("ENTRY") :]
    cycles = map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry))
    kernels = re.findall(r"%(\w+?)[.\d]* = [^\n]*tpu_custom_call", entry)
    return sum(each for each in cycles if each < UNKNOWN), Counter(kernels)


def needs(step: StepShape) -> tuple[int, int]:
    """Return the operations and the bytes of weights and cache of a step."""
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    wide = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    narrow = 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    layer = hidden * (2 * wide + narrow + 3 * inner)
    head = hidden * SHAPE["vocab_size"]
    each = step.tokens // step.rows
    pairs = step.rows * sum(step.context - each + i + 1 for i in range(each))
    # The last layer computes only keys and values of tokens that are not sampled.
    full = LAYERS - 1
    flops = full * (2 * step.tokens * layer + 4 * pairs * wide)
    flops += 2 * step.tokens * hidden * narrow
    flops += 2 * step.rows * (layer + head)
    nbytes = 2 * (LAYERS * (layer + step.rows * step.context * narrow) + head)
    return flops, nbytes


def kernel_cycles(topology: str, name: str, folder: Path) -> dict[str, int]:
    """Return the cycles of a step's Pallas kernels, by the names of their launches.

    Those of their transfers, if these take longer.
    """
    chip = CHIPS[topology.partition(":")[0]]
    known = launches(topology)
    chosen = {label: known[label] for label in STEPS[name].kernels.values()}
    return {
        row.name: max(
            row.cycles, int(chosen[row.name].nbytes / chip.bandwidth * chip.clock)
        )
        for row in compiled(topology, chosen, folder)
    }


def report(topology: str, name: str, folder: Path) -> None:
    """Print the cycles of a step and its share of the limits."""
    step, chip = STEPS[name], CHIPS[topology.partition(":")[0]]
    # libtpu writes about all programs of a process, or none.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        rows = pool.submit(kernel_cycles, topology, name, folder).result()
    with one_chip(topology) as spec:
        few, fewer = (estimates(program(spec, step, n)) for n in (3, 2))
    layer, others = few[0] - fewer[0], 2 * fewer[0] - few[0]
    runs = few[1] - fewer[1]
    if set(runs) != set(step.kernels):
        raise SystemExit(f"Pallas kernels of a layer: {dict(runs)}")
    written = {k: n * rows[step.kernels[k]] for k, n in runs.items()}
    print(f"{topology} {name}: a layer {layer} cycles of XLA, {written} of Pallas")
    # XLA's own cycles of the last layer, which has fewer rows, are among the others.
    cycles = (LAYERS - 1) * layer + others + LAYERS * sum(written.values())
    flops, nbytes = needs(step)
    seconds = cycles / chip.clock
    shares = flops / chip.flops / seconds, nbytes / chip.bandwidth / seconds
    print(
        f"{topology} {name}: {1e3 * seconds:.2f} ms, {shares[0]:.2f} of FLOPs, "
        f"{shares[1]:.2f} of bandwidth"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology", nargs="?", default="v6e:2x2")
    parser.add_argument("--steps", nargs="+", default=[*STEPS], choices=STEPS)
    options = parser.parse_args()
    for name in options.steps:
        with TemporaryDirectory(prefix="tpu-bundles-") as folder:
            report(options.topology, name, Path(folder))


if __name__ == "__main__":
    main()
