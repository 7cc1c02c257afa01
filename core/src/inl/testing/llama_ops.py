"""Primitive ops that a Llama calls, found by tracing a tiny one."""

from __future__ import annotations

from inl.executor.tracing import trace
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.selection import KernelSelection
from inl.spec.step import SAMPLERS, Bucket
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights


def llama_ops() -> list[str]:
    """Return the names of the ops, of steps with every sampler, in order of use."""
    import numpy as np

    checkpoint = MemoryCheckpoint(*tiny_llama(np.random.default_rng(0)))
    config = MODEL.config(checkpoint.config)
    kernels = tuple(
        Kernel(op.name, "any", lambda *_, **__: None)
        for op in catalog().values()
        if not op.composite
    )
    stored = stored_specs(checkpoint)
    groups = plan_weights(MODEL.weights(config), kernels, stored, ranks=1)
    limits = Limits(slots=3, blocks=(9,), block_size=16, max_blocks_per_seq=4, vocab=96)
    names: dict[str, None] = {}
    for sampler in SAMPLERS:
        tracer = trace(
            MODEL, config, groups, Bucket(tokens=16, rows=2, sampler=sampler), limits,
            KernelSelection(kernels),
        )  # fmt: skip
        names.update(dict.fromkeys(op for op, _ in tracer.counts))
    return list(names)
