"""Lookup of the architecture of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inl.errors import UnknownArchitecture
from inl.plugin import builtin_registry, registry
from inl.spec.model import Model


def find_model(hf: Mapping[str, Any], path: Path) -> Model:
    """Return the model for a config's ``architectures``, else its ``model_type``.

    Raises :class:`UnknownArchitecture`, which lists the registered names.
    """
    architectures = hf.get("architectures")
    listed = architectures if isinstance(architectures, (list, tuple)) else []
    names = [name for name in listed if isinstance(name, str)]
    kind = hf.get("model_type")
    if isinstance(kind, str):
        names.append(kind)
    for name in names:
        # No plugin can replace a built-in model: do not wait for their imports.
        model = builtin_registry().model(name) or registry().model(name)
        if model is not None:
            return model
    known = registry()
    raise UnknownArchitecture(
        f"{path}: config fields 'architectures' and 'model_type': found "
        f"{', '.join(map(repr, names)) or 'neither'}; "
        f"registered: {', '.join(sorted(known.models()))}"
    )
