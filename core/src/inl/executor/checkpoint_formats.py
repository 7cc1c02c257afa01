"""Opens models in the core's formats, and in those that plugins read."""

from __future__ import annotations

from pathlib import Path

from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.checkpoint import open_checkpoint as open_own_format
from inl.errors import CheckpointError, InlError, PluginError
from inl.plugin.contribution import describe
from inl.plugin.loader import registry


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint of any format that is installed.

    A format of the core is read by the core. Else the longest suffix that a plugin
    registers and the name of the file or folder ends with decides, or, for a folder,
    that of the only such file in it. Raises :class:`~inl.errors.CheckpointError`.
    """
    return open_own_format(path, _open_by_plugin)


def _open_by_plugin(path: Path) -> Checkpoint | None:
    suffixes = sorted(registry().names("format"), key=len, reverse=True)
    file = path
    suffix = _suffix(path, suffixes)
    if suffix is None and path.is_dir():
        files = [each for each in sorted(path.iterdir()) if _suffix(each, suffixes)]
        if len(files) == 1:
            file, suffix = files[0], _suffix(files[0], suffixes)
    return None if suffix is None else _read(suffix, file)


def _suffix(path: Path, suffixes: list[str]) -> str | None:
    return next((each for each in suffixes if path.name.endswith(each)), None)


def _read(suffix: str, path: Path) -> Checkpoint:
    try:
        origin, reader = registry().function("format", suffix)
    except PluginError as error:
        raise CheckpointError(f"{path}: {error}") from error
    try:
        checkpoint = reader(path)
    except (InlError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: {origin} cannot read it: {describe(error)}"
        ) from error
    if not isinstance(checkpoint, Checkpoint):
        raise CheckpointError(
            f"{path}: {origin}: format {suffix}: found "
            f"{type(checkpoint).__name__}, accepted: a Checkpoint"
        )
    return checkpoint
