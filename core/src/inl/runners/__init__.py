"""Runners of a model: in this process, in a worker, and a group of ranks."""
