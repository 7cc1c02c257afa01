"""Model files: checkpoints, packed numbers, and where a model comes from."""
