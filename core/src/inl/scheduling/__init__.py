"""Continuous batching: requests, block tables and step plans, in plain integers."""
