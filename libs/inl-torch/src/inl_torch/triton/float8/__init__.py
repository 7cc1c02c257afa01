"""Products of 8-bit floats on the matrix units: weights and activations in E4M3."""
