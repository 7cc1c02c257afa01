"""Norms of all heads of queries and keys together, which attention does not fuse."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models import olmoe
from inl.spec.limits import Limits
from inl.testing.tiny import local_runner
from inl.testing.traffic import Traffic, play
from random_families import random_family

LIMITS = Limits(slots=6, blocks=(60,), block_size=4, max_blocks_per_seq=12, vocab=96)


@pytest.mark.parametrize("heads", [2, 6])
def test_decoding_rows_normalize_all_heads_together(heads, backend):
    """Steps of one row store queries, keys and values as steps of many rows do."""
    files = random_family(olmoe.MODEL, "olmoe", num_key_value_heads=heads)

    def texts(device, dtype):
        runner = local_runner(device, olmoe.MODEL, files, LIMITS, dtype=dtype)
        traffic = Traffic(np.random.default_rng(2), LIMITS)
        found = play(runner, traffic.frames(30))
        runner.close()
        return found

    exact = texts(ReferenceBackend(Device("reference:0"), dtype="float64"), "float64")
    assert texts(backend, "float32") == exact
