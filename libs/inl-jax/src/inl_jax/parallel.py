"""Parameters of JAX models divided among the devices of a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inl.errors import RequestError


class ShardedParameters(NamedTuple):
    """Parameters on a mesh; results of ``jax.jit`` are divided as they are."""

    parameters: Any
    batch: NamedSharding
    """Of arrays with the batch first: divided among the copies."""
    mesh: Mesh


def shard(parameters: Any, data: int, pipeline: int, tensor: int) -> ShardedParameters:
    """Place parameters on a mesh of ``data * tensor`` devices.

    The last axis of matrices that ``tensor`` divides is divided among devices, the
    other parameters are copied. Raises :class:`~inl.errors.RequestError` for a
    pipeline, for too few devices, and for what has no arrays.
    """
    leaves = jax.tree.leaves(parameters)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise RequestError(
            f"apply_parallelism: found {type(parameters).__name__}, accepted: a "
            "torch.nn.Module, or a tree of arrays for JAX"
        )
    if pipeline > 1:
        raise RequestError(
            f"apply_parallelism: found pipeline_parallel={pipeline}, accepted: 1 with "
            "JAX, or a torch.nn.Sequential"
        )
    devices = jax.devices()
    if len(devices) < data * tensor:
        raise RequestError(
            f"apply_parallelism: found {len(devices)} devices, accepted: at least "
            f"{data * tensor} (data={data} * tensor={tensor})"
        )
    axes = ("data", "tensor")
    mesh = jax.make_mesh((data, tensor), axes, devices=devices[: data * tensor])

    def placed(leaf: Any) -> Any:
        is_divided = leaf.ndim > 1 and leaf.shape[-1] % tensor == 0
        axis = [None] * (leaf.ndim - 1) + ["tensor"] if is_divided else []
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axis)))

    batch = NamedSharding(mesh, PartitionSpec("data"))
    return ShardedParameters(jax.tree.map(placed, parameters), batch, mesh)
