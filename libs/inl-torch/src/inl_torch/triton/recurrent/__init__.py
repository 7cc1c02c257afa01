"""Recurrent layers over per-slot state as Triton kernels."""
