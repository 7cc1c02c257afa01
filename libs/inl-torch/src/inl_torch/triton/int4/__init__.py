"""Products of weights of 4 bits, which are converted to the compute dtype."""
