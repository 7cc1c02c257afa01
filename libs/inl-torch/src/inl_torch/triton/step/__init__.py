"""Step arrays, admissions and embeddings, as Triton kernels."""
