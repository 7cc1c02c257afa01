"""Constraints of what a request generates: grammars and banned tokens."""
