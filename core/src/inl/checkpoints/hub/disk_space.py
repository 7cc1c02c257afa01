"""Messages for a disk without space."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from inl.errors import CheckpointError

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
TEXTS: Final = ("No space left on device", "Not enough free disk space", "os error 28")
"""Messages of errors without ``errno``, as of packages written in Rust."""


def free_bytes(folder: Path) -> int | None:
    """Return the free space on the disk of a folder; ``None`` if it is not known."""
    import shutil

    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, is that a disk is full."""
    for _ in range(20):
        if error is None:
            return False
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(text in str(error) for text in TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def no_space(what: str, folder: Path, needed: int | None) -> CheckpointError:
    """Return the error for a download that does not fit on the disk."""
    free = free_bytes(folder)
    found = "a full disk" if free is None else f"{free} bytes free"
    accepted = "the size of its files" if needed is None else f"{needed} bytes"
    return CheckpointError(
        f"{what}: cannot be stored in {folder}: found {found}; accepted: {accepted} "
        "of free space. Free some, or set INL_CACHE (for names of Hugging Face: "
        "HF_HOME) to a folder on another disk"
    )
