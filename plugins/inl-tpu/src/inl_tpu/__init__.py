"""Google TPUs as devices of INL, through JAX."""
