"""A router that needs no memory: several servers agree without knowing each other."""
