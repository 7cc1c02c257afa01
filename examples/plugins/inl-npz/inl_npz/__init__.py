"""Models whose weights are in a NumPy archive."""
