"""Runs the steps of a model in other processes."""
