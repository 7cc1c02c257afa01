"""Location of the files that INL keeps between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: ``INL_CACHE``, else ``inl`` in the user's caches.

    A user without a home has one of their own among the temporary files.
    """
    if folder := os.environ.get("INL_CACHE"):
        return Path(folder)
    variable, inside = (
        ("LOCALAPPDATA", "AppData/Local")
        if sys.platform == "win32"
        else ("XDG_CACHE_HOME", ".cache")
    )
    try:
        return Path(os.environ.get(variable) or Path.home() / inside) / "inl"
    except RuntimeError:  # no HOME, and a user number without a name
        import tempfile

        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"inl-{user}"
