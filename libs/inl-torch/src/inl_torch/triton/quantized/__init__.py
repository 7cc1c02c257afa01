"""Products with packed weights, as Triton kernels."""
