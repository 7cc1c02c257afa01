"""The CPU as a device of INL, through torch."""
