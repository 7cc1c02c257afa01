"""Each verb of a mesh's collectives on eight devices of the CPU platform, as JSON."""

from __future__ import annotations

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from inl.backend.collectives import AXES, BODIES, Rank
from inl.placement.placement import parse_placement
from inl.testing.rank_program import body_result
from inl_jax.mesh.collectives import MeshCollectives

DTYPES = ("float32", "bfloat16", "int32")


def found(mesh, axis, verb, parts):
    """The results of all devices, in the order of their numbers."""
    collectives = MeshCollectives(parse_placement(sys.argv[1]))
    everywhere = PartitionSpec(AXES)

    def one(x):
        return getattr(collectives, verb)(x[0], axis)[None]

    run = jax.shard_map(
        one, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    return np.asarray(jax.jit(run)(parts).astype("float32"))


def indices(mesh, axis):
    collectives = MeshCollectives(parse_placement(sys.argv[1]))
    run = jax.shard_map(
        lambda: collectives.index(axis)[None], mesh=mesh, in_specs=(),
        out_specs=PartitionSpec(AXES), check_vma=False,
    )  # fmt: skip
    return np.asarray(jax.jit(run)()).tolist()


def main():
    placement = parse_placement(sys.argv[1])
    grid = np.array(jax.devices()[: placement.count]).reshape(placement.sizes)
    mesh = Mesh(grid, AXES)
    ranks = [
        Rank(n, placement.count, axes=placement.axes) for n in range(placement.count)
    ]
    rng = np.random.default_rng(4)
    wrong, compared = [], 0
    for axis in AXES:
        if indices(mesh, axis) != [rank.position(axis) for rank in ranks]:
            wrong.append(f"index along {axis}")
        for verb in BODIES:
            for dtype in DTYPES:
                shape = placement.count, 2 * getattr(placement, axis), 3
                parts = rng.integers(-8, 9, shape)
                results = found(mesh, axis, verb, jax.numpy.array(parts, dtype))
                for rank, result in zip(ranks, results, strict=True):
                    compared += 1
                    if not np.array_equal(result, body_result(verb, parts, rank, axis)):
                        wrong.append(f"{verb} of {dtype} along {axis}, rank {rank}")
    print(json.dumps({"wrong": wrong, "compared": compared}))


if __name__ == "__main__":
    main()
