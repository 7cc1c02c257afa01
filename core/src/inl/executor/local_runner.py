"""Public name of :mod:`inl.runners.local_runner`."""

from inl.runners.local_runner import LocalRunner

__all__ = ["LocalRunner"]
