"""Rows and output of bench/cuda_kernels.py."""
