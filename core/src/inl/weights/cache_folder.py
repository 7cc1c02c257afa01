"""Public name of :mod:`inl.cache_dir.location`."""

from inl.cache_dir.location import cache_folder

__all__ = ["cache_folder"]
