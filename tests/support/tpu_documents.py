"""Run the blocks of documents that need a TPU on inl-tpu, in a process of its own.

JAX's CPU platform stands for a TPU; attention is the Pallas kernel, in JAX's TPU
interpreter. Prints the number of blocks, and whether the kernel was traced.
"""

from __future__ import annotations

import os
from dataclasses import replace

os.environ["INL_TPU_PLATFORM"] = "cpu"

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from byte_tokens import bytes_as_tokens
from document_blocks import Document, blocks
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl_jax.pallas import paged_attention
from inl_tpu.backend import TpuBackend

SHORT = {
    'backend="auto"': 'backend="tpu", context=64, dtype="float32"',
    "max_tokens=100": "max_tokens=3",
    '"Tell me a story"': '"Tell", max_tokens=2',
}
"""The interpreter takes a second for each token."""


def wide_model():
    """A model whose heads are as wide as the kernel needs them."""
    made = tiny_llama(
        np.random.default_rng(5), vocab=256, heads=2, kv_heads=1, head_dim=64, layers=1
    )
    checkpoint = MemoryCheckpoint(*made)
    model = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    return model, bytes_as_tokens()


def with_pallas(traced):
    """Offer the Pallas kernel, interpreted, on every platform."""
    plain = TpuBackend.kernels
    interpreted = paged_attention.kernel(pltpu.InterpretParams())

    def run(*args, **attrs):
        traced.append(1)
        return interpreted.run(*args, **attrs)

    def kernels(self):
        yield from plain(self)
        yield replace(interpreted, run=run)

    TpuBackend.kernels = kernels


def main():
    traced = []
    with_pallas(traced)
    done = 0
    document = Document("tpu_devices", wide_model)
    for number in range(len(blocks("tpu_devices"))):
        document.run(number)
        done += 1
    names = document.names
    assert names["tpu"].initialize() is True
    assert names["tpu_device"].is_available()
    assert names["c"].device == Device("tpu")
    engines = Document("tpu_inl", wide_model, replaced=SHORT)
    engines.checks = {}
    engines.run(1)
    engine, output = engines.names["engine"], engines.names["output"]
    assert str(engine.device).startswith("tpu")
    assert len(output.token_ids) == 3
    engine.close()
    print(f"\nblocks {done + 1}, pallas {bool(traced)}")


main()
