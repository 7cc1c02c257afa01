"""CPU backend of INL: native C++ kernels on NumPy's memory, or torch without them."""
