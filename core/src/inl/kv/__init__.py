"""Blocks of the KV cache: pool, tables, hashes and prefix cache, in integers."""
