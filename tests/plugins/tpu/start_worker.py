"""Starts a tiny Llama and compiles all buckets; prints times and cache hits as JSON."""

from __future__ import annotations

import json
import os
import time
from collections import Counter

os.environ["INL_TPU_PLATFORM"] = "cpu"

import jax
import numpy as np

from inl.device import Device
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl_tpu.backend import TpuBackend

LIMITS = Limits(4, (29,), 4, 12, 96, sampler="greedy")
CACHE = "/jax/compilation_cache/"


def main():
    seen = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
    backend = TpuBackend(Device("tpu:0"))
    # The programs of a tiny model are compiled faster than those that are kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(11), layers=1))
    runner = local_runner(backend, MODEL, files, LIMITS)
    seen.clear()
    start = time.perf_counter()
    runner.executor.precompile(runner.limits.buckets)
    runner.executor.warm_up(lambda *_: None)
    print(json.dumps({
        "seconds": time.perf_counter() - start,
        "buckets": len(runner.limits.buckets),
        "hits": seen[CACHE + "cache_hits"],
        "misses": seen[CACHE + "cache_misses"],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
