"""Attention, rotary embedding and cache writes, as Triton kernels."""
