"""Products with block-sparse matrices, and their gradients, as Triton kernels."""
