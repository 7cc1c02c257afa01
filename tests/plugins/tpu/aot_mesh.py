"""Compiles a step of a Llama over a mesh of TPUs without one; prints facts as JSON.

Usage: aot_mesh.py TOPOLOGY MESH LAYERS [PLANTED], in a process of its own. PLANTED:
"gather", a kernel that gathers the cache.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial

import aot_worker  # noqa: F401  # sets the environment of libtpu
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inl.backend.ranks import over_ranks
from inl.executor.model_step import advance
from inl.executor.tracing import trace
from inl.models.llama import MODEL
from inl.spec.dispatch import ResolvedOps
from inl.spec.limits import Limits
from inl.spec.mesh import MeshSizes, parse_mesh
from inl.spec.message import layout
from inl.spec.op import CATALOG
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.tree import tree_map
from inl.weights.plan import plan_weights
from inl_jax import pallas, xla
from inl_jax.mesh.backend import CACHE_SPEC, spread
from inl_jax.mesh.collectives import MeshCollectives
from inl_jax.pages import Pages, paged_state
from inl_jax.programs import jitted

ROWS, VOCAB = 32, 128256
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
"""The 8B shape."""


def gathering(kernel):
    def run(*args):
        pages = kernel.run(*args)
        heads = pages.kv.shape[1]
        every = jax.lax.all_gather(pages.kv, "tensor", axis=1, tiled=True)
        first = jax.lax.axis_index("tensor") * heads
        return Pages(jax.lax.dynamic_slice_in_dim(every, first, heads, axis=1))

    return replace(kernel, run=run)


def single_device_kernels(planted):
    if not planted:
        return (*xla.KERNELS, *pallas.kernels())
    return tuple(
        gathering(kernel) if kernel.op == "write_kv" else kernel
        for kernel in xla.KERNELS
    )


def compiled(devices, sizes, layers, planted):
    """The text of a decoding step, the shape of a device's cache, and its memory."""
    mesh = Mesh(np.array(devices[: sizes.devices]).reshape(sizes), MeshSizes._fields)

    def spec(shape, dtype, axes=()):
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    config = MODEL.config({**CONFIG, "num_hidden_layers": layers})
    config = replace(config, dtype="bfloat16")
    limits = Limits(ROWS + 1, (1022,), 32, 256, VOCAB, sampler="greedy")
    kernels = over_ranks(single_device_kernels(planted), MeshCollectives(sizes))
    selection = KernelSelection(tuple(kernels))
    ranks, bucket = sizes.tensor, Bucket(ROWS, ROWS)
    groups = plan_weights(MODEL.weights(config), selection.kernels, {}, ranks=ranks)
    ops = ResolvedOps(
        trace(MODEL, config, groups, bucket, limits, selection, ranks=ranks)
    ).at(bucket)

    def placed(plan):
        tensors = {
            name: spec(param.shape, "bfloat16", plan.axes(param))
            for name, param in plan.group.params.items()
        }
        return CATALOG[plan.group.op].weights(**tensors)

    state = paged_state(
        MODEL.state(config), limits, spec, lambda *a: spec(*a, CACHE_SPEC)
    )
    words = layout(bucket, groups=1, block_size=limits.block_size).size
    args = tree_map(placed, groups), spec((words,), "int32"), state
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        body = spread(mesh, partial(advance, ops, MODEL, config), args)
        lowered = jitted(body, (2,)).trace(*args).lower(lowering_platforms=("tpu",))
        program = lowered.compile()
    shape = state.caches[0].kv.sharding.shard_shape(state.caches[0].kv.shape)
    return program.as_text(), shape, program.memory_analysis()


def results(text, op):
    """Shapes of the results of a collective, started asynchronously or not."""
    return re.findall(rf"= (\S.*?) {op}(?:-start)?\(", text)


def main(topology, mesh, layers, planted=""):
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    text, cache, memory = compiled(
        found.devices, parse_mesh(mesh), int(layers), planted
    )
    print(json.dumps({
        "device": found.devices[0].device_kind,
        "all-reduce": results(text, "all-reduce"),
        "all-gather": results(text, "all-gather"),
        "others": [
            op for op in ("all-to-all", "reduce-scatter", "collective-permute")
            for _ in results(text, op)
        ],
        "cache": list(cache),
        "attentions": len(re.findall(r"ragged_paged_attention[\w.]* = ", text)),
        "callbacks": text.count("callback"),
        "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
