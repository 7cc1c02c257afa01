"""Models on disk: what their files say, downloads and removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.digest import model_digest
from inl.checkpoints.hub.resolve import cached_model, find_model, resolve_model
from inl.checkpoints.hub.stored import (
    arrived_bytes,
    download_bytes,
    remove_files,
    size_of,
    stored_files,
)
from inl.errors import InlError
from inl.executor.checkpoint_formats import open_checkpoint
from inl.weights.load import stored_specs

POLL_SECONDS = 0.5
"""Time between two reports of a download."""

Report = Callable[[int, int | None], None]
"""Receives the bytes that have arrived, and all, if they are known."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the files of a model say about it; empty for files that cannot be read."""

    size: int = 0
    """Bytes of all files with tensors."""
    modified: float = 0.0
    """Unix time."""
    digest: str = ""
    """As :func:`~inl.checkpoints.digest.model_digest`."""
    format: str = ""
    """"gguf", "safetensors", or the suffix of a format that a plugin reads."""
    parameters: int = 0
    dtype: str = ""
    """That of most parameters."""
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""


def read_card(place: str | None) -> ModelCard:
    """Return what the files of a model say, without a network.

    place: folder, file or known name; ``None`` is the default model.
    """
    try:
        path = cached_model(place)
        if path is None:
            return ModelCard()
        with closing(open_checkpoint(path)) as checkpoint:
            return _card(checkpoint)
    except InlError:
        return ModelCard()


def _card(checkpoint: Checkpoint) -> ModelCard:
    counts: dict[str, int] = {}
    for spec in stored_specs(checkpoint).values():
        counts[spec.dtype] = counts.get(spec.dtype, 0) + prod(spec.shape)
    states = [path.stat() for path in checkpoint.files()]
    template = checkpoint.chat_template
    return ModelCard(
        size=sum(each.st_size for each in states),
        modified=max((each.st_mtime for each in states), default=0.0),
        digest=model_digest(checkpoint),
        format=_format(checkpoint.path),
        parameters=sum(counts.values()),
        dtype=max(counts, key=lambda name: counts[name], default=""),
        config=dict(checkpoint.config),
        template="" if template is None else template.source,
    )


def _format(path: Path) -> str:
    return "safetensors" if path.is_dir() else path.suffix[1:] or "gguf"


def pull_model(name: str, report: Report) -> Path:
    """Download a model, unless it is cached; return its path.

    report: called about twice a second until it has arrived. Raises
    :class:`~inl.errors.CheckpointError` and :class:`~inl.errors.MissingPackage`.
    """
    found = find_model(name)
    if found is None or isinstance(found, Path):
        return resolve_model(name)
    total = download_bytes(found)
    before = 0 if cached_model(name) else arrived_bytes(found)
    with ThreadPoolExecutor(1, "inl-download") as threads:
        download = threads.submit(resolve_model, name)
        while wait_for([download], POLL_SECONDS).not_done:
            arrived = arrived_bytes(found) - before
            report(arrived if total is None else min(arrived, total), total)
        path = download.result()
    if total is not None:
        report(total, total)
    return path


def remove_model(name: str) -> int:
    """Remove a model from its cache; return the bytes freed.

    Raises :class:`~inl.errors.CheckpointError` if it is in no cache.
    """
    files = stored_files(name)
    size = size_of(files)
    remove_files(files)
    return size
