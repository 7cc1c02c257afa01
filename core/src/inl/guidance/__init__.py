"""Structured output: grammars that constrain what a request generates."""
