"""Compiles attention for a TPU without one; prints what the compiler says, as JSON.

Usage: aot_worker.py TOPOLOGY PLANTED, in a process of its own: libtpu keeps its state.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    # Without a TPU, processes need not take turns.
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inl.spec.step import Step
from inl_jax.pages import Pages
from inl_jax.pallas import paged_attention

PAGE, BLOCKS = 32, 1024
SHAPES = {
    "135M decode": (9, 3, 64, "bfloat16", 8, 8, 64),
    "8B decode": (32, 8, 128, "bfloat16", 64, 64, 256),
    "8B mixed": (32, 8, 128, "bfloat16", 512, 64, 256),
    "float32 mixed": (9, 3, 64, "float32", 64, 8, 64),
}
"""Name -> heads, kv_heads, head_dim, dtype, tokens, rows, blocks of a row."""


def compile_one(spec, shape, window=None):
    heads, kv_heads, dim, dtype, tokens, rows, table = shape
    counts = {"tokens": tokens, "positions": tokens, "rows": tokens, "starts": rows + 1}
    sizes = {name: (counts.get(name, rows),) for name in Step._fields}
    sizes |= {"blocks": (1, rows, table), "writes": (1, tokens), "used_counts": (3,)}
    step = Step(**{n: spec(s, "int32") for n, s in sizes.items() if n != "plan"})

    def run(q, pages, step):
        return paged_attention.attention(
            q, pages, step, scale=0.1, window=window, cap=None, group=0
        )

    pages = Pages(spec((BLOCKS, kv_heads, PAGE, 2 * dim), dtype))
    q = spec((tokens, heads, dim), dtype)
    lowered = jax.jit(run).trace(q, pages, step).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    assert "ragged_paged_attention" in compiled.as_text()
    return compiled.memory_analysis().temp_size_in_bytes


@contextmanager
def chip(topology):
    """Yield one chip of a topology, and a function that makes specs on it."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = Mesh(np.array(found.devices[:1]), ("chip",))
    place = NamedSharding(mesh, PartitionSpec())

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield found.devices[0], spec


def main(topology, planted):
    shapes = SHAPES
    if planted == "vmem":
        paged_attention.KEYS = 1 << 12
        shapes = {"planted": (32, 8, 128, "float32", 8, 8, 1024)}
    result = {}
    with chip(topology) as (device, spec):
        for name, shape in shapes.items():
            try:
                result[name] = compile_one(spec, shape)
            except Exception as error:
                result[name] = str(error)[:2000]
    print(json.dumps({"device": device.device_kind, "results": result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
