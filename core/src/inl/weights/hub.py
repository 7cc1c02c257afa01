"""Public name of :mod:`inl.checkpoints.hub.resolve`."""

from inl.checkpoints.hub.resolve import default_model, resolve_model

__all__ = ["default_model", "resolve_model"]
