"""Kernels of steps of one row in CUDA C++, which Triton cannot express as fast."""
