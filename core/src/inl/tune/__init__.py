"""Measuring which way of computing an op is fastest here, and whether it is right."""
