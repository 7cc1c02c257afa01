"""Quantization of a model's matrices while they are loaded."""
