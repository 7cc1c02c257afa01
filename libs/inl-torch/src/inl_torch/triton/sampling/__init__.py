"""Sampling without sorting the vocabulary, as Triton kernels."""
