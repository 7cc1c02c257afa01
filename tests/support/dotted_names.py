"""Objects by the dotted names of the documentation."""

from __future__ import annotations

import importlib


def resolve(path):
    """Return the object at ``inl.module.attribute``.

    Raises ``ImportError`` or ``AttributeError`` if there is none.
    """
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            value = getattr(value, part)
        return value
    raise ImportError(path)


def resolves(path):
    """Whether :func:`resolve` finds an object; arguments of a call are left out."""
    try:
        return resolve(path.partition("(")[0]) is not None
    except (AttributeError, ImportError):
        return False
