"""Checkpoints with quantized matrices, by method."""
