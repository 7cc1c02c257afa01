"""Lookup of the architecture of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from inl.errors import UnknownArchitecture
from inl.models.nearest import nearest
from inl.plugin import builtin_registry, registry
from inl.spec.model import Model


def find_model(hf: Mapping[str, Any], path: Path) -> Model:
    """Return the model for a config's ``model_type``, else for its ``architectures``.

    An encoder too (:attr:`~inl.executor.model_loader.LanguageModel.encoder`).
    ``architectures`` decides where no family has the ``model_type``: derived models
    keep the class whose config they have. Raises :class:`UnknownArchitecture`, which
    names the nearest supported family, what it lacks, and the registered names.
    """
    names = names_of(hf)
    for name in names:
        # No plugin can replace a built-in model: do not wait for their imports.
        model = builtin_registry().model(name) or registry().model(name)
        if model is not None:
            return cast("Model", model)
    known = registry().models()
    near = nearest(names, known)
    raise UnknownArchitecture(
        f"{path}: config fields 'model_type' and 'architectures': found "
        f"{', '.join(map(repr, names)) or 'neither'}; "
        f"{near}{'; ' if near else ''}registered: {', '.join(sorted(known))}"
    )


def names_of(hf: Mapping[str, Any]) -> list[str]:
    """Return the names of a config under which its model may be registered."""
    listed = hf.get("architectures")
    names = (
        hf.get("model_type"),
        *(listed if isinstance(listed, list | tuple) else ()),
    )
    return [name for name in names if isinstance(name, str)]
