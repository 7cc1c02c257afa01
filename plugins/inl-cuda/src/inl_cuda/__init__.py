"""NVIDIA GPUs as devices of INL, through torch and Triton."""
