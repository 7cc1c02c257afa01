"""Matrix products of few rows and what is fused with them, as Triton kernels."""
