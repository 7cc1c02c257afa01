"""Reader of tokenizer.json, an untrusted program for the ``tokenizers`` package."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from inl.cache_dir.location import cache_folder
from inl.text.tokenizer import Tokenizer, guarded, library
from inl.text.tokenizer_bounds import check_rules
from inl.text.tokenizer_check import try_tokenizer


def load_tokenizer(text: bytes, where: str) -> Tokenizer:
    """Build the tokenizer of a tokenizer.json without its truncation and padding.

    A text is tried in another process first, see :mod:`inl.text.tokenizer_check`, and
    remembered by its digest. Raises :class:`~inl.errors.CheckpointError`.
    """
    tokenizers = library()
    text = text.removeprefix(codecs.BOM_UTF8)  # which the library takes for JSON
    digest = hashlib.sha256(f"{tokenizers.__version__}\n".encode() + text).hexdigest()
    if not _was_tried(digest):
        try_tokenizer(text, where)
        _remember(digest)
    return build_tokenizer(text, where)


def build_tokenizer(text: bytes, where: str) -> Tokenizer:
    """Build a tokenizer in this process; raises CheckpointError."""
    build = library().Tokenizer.from_buffer
    rules = guarded(build, text, where=where, accepted="a tokenizer.json")
    guarded(check_rules, rules, where, where=where, accepted="bounded rules")
    return Tokenizer(rules, where=where)


def _tried() -> Path:
    """Folder with an empty file for each digest."""
    return cache_folder() / "tokenizers"


def _was_tried(digest: str) -> bool:
    """Return whether the stored digest was written by this user only."""
    try:
        status = _tried().lstat()
        own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        private = os.name != "posix" or not status.st_mode & 0o077
        return (
            own
            and private
            and stat.S_ISDIR(status.st_mode)
            and ((_tried() / digest).exists())
        )
    except OSError:
        return False


def _remember(digest: str) -> None:
    with suppress(OSError):  # without a cache, each start tries the file
        _tried().mkdir(mode=0o700, parents=True, exist_ok=True)
        (_tried() / digest).touch()
