"""Model files: readers of every format, and where a model comes from."""
