"""INL dynamics, forward and backward, as Triton kernels."""
