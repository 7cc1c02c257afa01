"""What bench/cuda_kernels.py measures, and how it shows it."""
