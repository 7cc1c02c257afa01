"""Speculative decoding: drafters, draft heads, and how many drafts a step verifies."""
