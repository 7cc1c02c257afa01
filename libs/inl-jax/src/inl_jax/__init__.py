"""What INL computes with JAX: kernels of XLA, compiled programs, sharded models."""

from inl_jax.mesh.validate import TensorSharding as TensorSharding
from inl_jax.mesh.validate import validate_sharding as validate_sharding
