"""Adapters of linear layers as Triton kernels."""
