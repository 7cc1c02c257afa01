"""What the torch backends share: eager kernels, tensors and CUDA graphs."""
