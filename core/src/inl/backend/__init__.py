"""What a backend is, and the ones made of NumPy and of functions."""
