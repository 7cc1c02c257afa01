"""Compiles whole steps of a Llama for a TPU without one; prints facts as JSON.

Usage: aot_steps.py TOPOLOGY MODEL TOKENSxSTEPS..., in a process of its own.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from functools import partial

import aot_worker  # sets the environment of libtpu
import jax
import jax.numpy as jnp

from inl.backend.provisional import DeviceLoops
from inl.executor.model_step import advance
from inl.executor.repeated_step import advance_repeated
from inl.executor.tracing import trace
from inl.models.llama import MODEL
from inl.spec.dispatch import ResolvedOps
from inl.spec.limits import Limits
from inl.spec.message import layout
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.tree import tree_map
from inl.weights.plan import plan_weights
from inl_jax import pallas, xla
from inl_jax.pages import paged_state
from inl_jax.programs import jitted

LAYERS = 2
MODELS = {"135M": (576, 1536, 9, 3, 49152)}
"""Name -> hidden size, inner size, heads, kv_heads, vocabulary."""

ROWS = 32


def facts(spec, sizes, bucket):
    hidden, inner, heads, kv_heads, vocab = sizes
    config = MODEL.config({
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    })  # fmt: skip
    config = replace(config, dtype="bfloat16")
    # With a prime number of blocks, no other array has the shape of a cache.
    limits = Limits(ROWS + 1, (1021,), 32, 256, vocab, sampler="greedy")
    selection = KernelSelection((*xla.KERNELS, *pallas.kernels()))
    groups = plan_weights(MODEL.weights(config), selection.kernels, {})
    tracer = trace(MODEL, config, groups, bucket, limits, selection)
    ops = ResolvedOps(tracer).at(bucket)
    weights = tree_map(
        lambda x: spec(x.shape, x.dtype),
        tree_map(lambda plan: plan.specs("bfloat16"), groups),
    )
    state = paged_state(MODEL.state(config), limits, spec)
    words = layout(bucket, groups=1, block_size=limits.block_size).size
    body = partial(advance, ops, MODEL, config)
    if bucket.repeat > 1:
        loops = DeviceLoops(jax.lax.while_loop, jnp)
        body = partial(advance_repeated, ops, MODEL, config, loops=loops)
    program = jitted(body, (2,))
    traced = program.trace(weights, spec((words,), "int32"), state)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    cache = math.prod(state.caches[0].kv.shape)
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    copied = [dims for dims in moved if math.prod(map(int, dims.split(","))) == cache]
    (kernel,) = {choice.winner for choice in tracer.choices["attention"].values()}
    return {
        "kernel": kernel,
        "attentions": len(re.findall(r"ragged_paged_attention[\w.]* = ", text)),
        "cache copies": len(copied),
        "callbacks": text.count("callback"),
        "state bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "aliased bytes": memory.alias_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
    }  # fmt: skip


def main(topology, name, *steps):
    result = {}
    with aot_worker.chip(topology) as (_, spec):
        for each in steps:
            tokens, repeat = map(int, each.split("x"))
            bucket = Bucket(tokens, ROWS, repeat=repeat)
            result[each] = facts(spec, MODELS[name], bucket)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
