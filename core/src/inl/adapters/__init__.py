"""LoRA adapters: their folders, matrices on a device, ops, and numbers at a runner."""
