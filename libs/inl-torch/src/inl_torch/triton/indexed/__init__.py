"""Sparse attention by an indexer as Triton kernels."""
