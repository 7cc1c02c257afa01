"""Triton kernels of step arrays, admissions and embeddings."""
