"""Drafts from a file of texts."""
