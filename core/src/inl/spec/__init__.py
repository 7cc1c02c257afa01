"""What ops, kernels, steps and messages are."""
