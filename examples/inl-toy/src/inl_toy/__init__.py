"""INL on toy devices."""
