"""Base of JAX backends, their kernels, and INL functions on JAX arrays."""
