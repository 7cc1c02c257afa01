"""The command ``inl tokens``."""
