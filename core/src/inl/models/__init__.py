"""Architectures, written once over ops."""
