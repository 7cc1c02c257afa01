"""Runs models on meshes of 8 virtual devices; prints what they answer as JSON.

Usage: mesh_worker.py CASE..., in a process of its own: JAX makes its devices once.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS="--xla_force_host_platform_device_count=8",
    INL_TPU_PLATFORM="cpu",
)

import jax
import numpy as np

from inl import EngineConfig, InferenceEngine
from inl.device import Device
from inl.executor.model_loader import LanguageModel, start_runner
from inl.models import llama, mixtral
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl.testing.traffic import Traffic, play
from inl.weights.sources import stored_tensors
from inl.workers.startup import over_mesh
from inl_tpu.backend import TpuBackend

LIMITS = Limits(5, (61,), 4, 12, 96, sampler="greedy")
MIXTRAL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def dense(**sizes):
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(11), **sizes))
    return LanguageModel(llama.MODEL, llama.MODEL.config(files.config), files)


def mixture():
    rng = np.random.default_rng(5)
    config, shapes = mixtral.MODEL.config(MIXTRAL), {}
    for group in leaves(mixtral.MODEL.weights(config)):
        for param in group.params.values():
            shapes |= stored_tensors(param)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        for name, shape in sorted(shapes.items())
    }
    return LanguageModel(mixtral.MODEL, config, MemoryCheckpoint(MIXTRAL, tensors))


MODELS = {
    "8 heads": dense,
    "2 kv heads": lambda: dense(kv_heads=2),
    "biases": lambda: dense(bias=True),
    "experts": mixture,
}
CASES = {
    "tensor=8": ("8 heads", 1),
    "data=2,tensor=4": ("2 kv heads", 1),
    "tensor=8 with biases": ("biases", 8),
    "tensor=2,expert=4": ("experts", 1),
    "data=2,tensor=2,expert=2": ("experts", 8),
}


def runner(language, mesh, **given):
    backend = over_mesh(TpuBackend(Device("tpu:0")), mesh)
    config = EngineConfig(dtype="float32")
    return start_runner(language, backend, config, limits=replace(LIMITS, **given))


def played(name, mesh, steps, *, seed=6):
    """Play random traffic; return its texts, and the logits of a frame after it."""
    one = runner(MODELS[name](), mesh, decode_steps=steps, max_drafts=0)
    source = Traffic(np.random.default_rng(seed), one.limits, sampler="greedy")
    return {str(k): list(map(int, v)) for k, v in play(one, source.frames(30)).items()}


def main(*names):
    result = {}
    for name in names:
        model, steps = CASES[name]
        mesh = name.partition(" ")[0]
        alone, many = played(model, None, steps), played(model, mesh, steps)
        result[name] = {"alone": alone, "mesh": many}
    print(json.dumps({"devices": len(jax.devices()), "results": result}))


if __name__ == "__main__":
    main(*(sys.argv[1:] or CASES))
