"""Base library of the torch backends: kernels, tensors and CUDA graphs."""
