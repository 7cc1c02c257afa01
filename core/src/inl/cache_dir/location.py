"""Location of the files that INL keeps between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: ``INL_CACHE``, else ``inl`` in the user's caches."""
    if folder := os.environ.get("INL_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(base) / "inl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inl"
