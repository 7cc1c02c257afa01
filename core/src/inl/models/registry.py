"""Which architecture reads a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inl.errors import UnknownArchitecture
from inl.plugin import registry
from inl.spec.model import Model


def find_model(hf: Mapping[str, Any], path: Path) -> Model:
    """Look the config's ``architectures``, then its ``model_type``, up.

    Raises :class:`UnknownArchitecture` with what was found and what is registered.
    """
    found = hf.get("architectures")
    listed = found if isinstance(found, (list, tuple)) else []
    names = [name for name in listed if isinstance(name, str)]
    kind = hf.get("model_type")
    if isinstance(kind, str):
        names.append(kind)
    known = registry()
    for name in names:
        model = known.model(name)
        if model is not None:
            return model
    raise UnknownArchitecture(
        f"{path}: config fields 'architectures' and 'model_type': found "
        f"{', '.join(map(repr, names)) or 'neither'}; "
        f"registered: {', '.join(sorted(known.models()))}"
    )
