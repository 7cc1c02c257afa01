"""Runs ``inl check`` of a mesh of two virtual devices with a planted fault.

Usage: mesh_faults.py FAULT, in a process of its own; prints the message as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

os.environ["JAX_PLATFORMS"] = os.environ["INL_TPU_PLATFORM"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from inl.device import Device
from inl.dtypes import wrap
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.target import Target
from inl_jax.mesh.backend import MeshBackend
from inl_jax.mesh.collectives import MeshCollectives


def without_sums():
    MeshCollectives.all_reduce = lambda _self, x, axis: x


def halves_swapped():
    right = MeshBackend.divided

    def divided(self, data, axes, first_only):
        if "tensor" in axes:
            at = axes.index("tensor")
            size = data.shape[at] // 2
            rolled = np.roll(data.data, size, at)
            data = wrap(rolled) if data.dtype == "float32" else data
        return right(self, data, axes, first_only)

    MeshBackend.divided = divided


FAULTS = {"none": lambda: None, "sums": without_sums, "halves": halves_swapped}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    checks = checks_of(Target(Device("tpu:0")), ["runner"])
    (check,) = [each for each in checks if each.name == "runner/mesh/float32"]
    print(json.dumps(perform(check, {}).message))
