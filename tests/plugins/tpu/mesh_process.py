"""One of several processes whose devices form a mesh; prints its texts as JSON.

Usage: mesh_process.py MODEL MESH, with the variables of inl_jax.mesh.distributed.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
from mesh_worker import MODELS, runner, texts


def main(model, mesh):
    many = runner(MODELS[model](), mesh)
    found = texts(many, many.limits)
    print(json.dumps({
        "texts": found,
        "processes": jax.process_count(),
        "local": len(jax.local_devices()),
        "devices": len(jax.devices()),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
