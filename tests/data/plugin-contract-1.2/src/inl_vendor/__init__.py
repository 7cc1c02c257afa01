"""INL on a vendor's devices."""
