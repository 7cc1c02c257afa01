"""Public name of :mod:`inl.checkpoints.gguf.checkpoint`."""

from inl.checkpoints.gguf.checkpoint import GgufCheckpoint

__all__ = ["GgufCheckpoint"]
