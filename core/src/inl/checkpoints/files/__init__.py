"""Bounds-checked readers of safetensors, torch and JSON files."""
