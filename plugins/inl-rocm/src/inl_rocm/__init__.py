"""AMD GPUs as devices of INL, through torch's ROCm build and Triton."""
