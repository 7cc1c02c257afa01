"""INL dynamics on JAX arrays."""
