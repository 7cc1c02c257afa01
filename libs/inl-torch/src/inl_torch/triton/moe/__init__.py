"""Mixture of experts, as Triton kernels."""
