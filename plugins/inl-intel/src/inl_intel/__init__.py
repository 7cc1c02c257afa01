"""Intel GPUs as devices of INL, through ``torch.xpu`` and Triton."""
