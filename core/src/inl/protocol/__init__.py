"""The interface between an engine and the runner that computes its steps."""
