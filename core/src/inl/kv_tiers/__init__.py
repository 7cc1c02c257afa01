"""Tiers of storage for blocks of the KV cache: host memory, then files."""
