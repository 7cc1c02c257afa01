"""Compiles a step of a Llama over a mesh of TPUs without one; prints facts as JSON.

Usage: aot_mesh.py TOPOLOGY MESH LAYERS [PLANTED] [KIND], in a process of its own.
PLANTED: "gather", a kernel that gathers the cache, or "". KIND: of packed weights.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import aot_worker  # noqa: F401  # sets the environment of libtpu
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inl.backend.collectives import AXES
from inl.checkpoints.blocks.dtypes import packed_bytes
from inl.dtypes import HostArray
from inl.executor.model_step import advance
from inl.executor.tracing import trace
from inl.models.llama import MODEL
from inl.placement.placement import parse_placement
from inl.spec.dispatch import ResolvedOps
from inl.spec.limits import Limits
from inl.spec.message import layout
from inl.spec.op import CATALOG, Spec
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.tree import leaves, tree_map
from inl.weights.plan import plan_weights
from inl_jax import pallas, xla
from inl_jax.mesh.backend import CACHE_SPEC, over_mesh, spread
from inl_jax.pages import Pages, paged_state
from inl_jax.programs import jitted
from inl_jax.tensors import from_host

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


def packed_specs(plan, spec):
    """Specs of packed weights of all ranks, by packing zeros for one of them."""

    def zeros(name, param):
        shape, kind = plan.shard(param), plan.stored[name]
        size = packed_bytes(shape[1:], kind)
        return HostArray(np.zeros((shape[0], size), np.uint8), kind, shape)

    group = {name: zeros(name, param) for name, param in plan.group.params.items()}
    host = SimpleNamespace(tensor=lambda x: from_host(x, jax.devices("cpu")[0]))
    one = plan.kernel.pack(group, host, "bfloat16")
    return jax.tree.map(
        lambda x: spec((plan.ranks * len(x), *x.shape[1:]), x.dtype, ("tensor",)), one
    )


def stored_layers(weights, kind):
    """Specs of the layers' matrices in a checkpoint of a kind."""
    params = [p for group in leaves(weights.layers) for p in group.params.values()]
    return {p.source: Spec(p.shape, kind) for p in params if "_proj" in p.source}


def compiled(devices, sizes, layers, planted, kind):
    """The text of a decoding step, the shape of a device's cache, and its memory."""
    mesh = Mesh(np.array(devices[: sizes.count]).reshape(sizes.sizes), AXES)

    def spec(shape, dtype, axes=()):
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    config = MODEL.config({**CONFIG, "num_hidden_layers": layers})
    config = replace(config, dtype="bfloat16")
    limits = Limits(ROWS + 1, (1022,), 32, 256, VOCAB, sampler="greedy")
    kernels = over_mesh(single_device_kernels(planted), sizes)
    selection = KernelSelection(tuple(kernels))
    ranks, bucket = sizes.tensor, Bucket(ROWS, ROWS)
    weights = MODEL.weights(config)
    stored = stored_layers(weights, kind) if kind else {}
    groups = plan_weights(weights, selection.kernels, stored, ranks=ranks)
    ops = ResolvedOps(
        trace(MODEL, config, groups, bucket, limits, selection, ranks=ranks)
    ).at(bucket)

    def placed(plan):
        if plan.layout == "packed":
            return packed_specs(plan, spec)
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


def main(topology, mesh, layers, planted="", kind=""):
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    text, cache, memory = compiled(
        found.devices, parse_placement(mesh), int(layers), planted, kind
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
        "packed products": len(re.findall(r"packed_matmul[\w.]* = ", text)),
        "callbacks": text.count("callback"),
        "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
