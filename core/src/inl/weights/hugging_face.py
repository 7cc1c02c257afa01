"""Public name of :mod:`inl.checkpoints.hub.hugging_face`."""

from inl.checkpoints.hub.hugging_face import parse_name, select_files

__all__ = ["parse_name", "select_files"]
