"""The scaffold of a traced backend, as a fixture."""

from traced import jax_module as jax_module
