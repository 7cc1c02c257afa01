"""Runs the steps of a model on a backend of this process."""
