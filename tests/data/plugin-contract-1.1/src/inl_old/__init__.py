"""INL on old devices."""
