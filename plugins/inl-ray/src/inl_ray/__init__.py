"""INL in a Ray cluster: the place ``ray:DEVICE``, and completions of datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl_ray.batches import map_batches as map_batches

__all__ = ["map_batches"]


def __getattr__(name: str) -> Any:
    """Import Ray once it is needed: plugins are listed without it."""
    if name != "map_batches":
        raise AttributeError(f"module 'inl_ray' has no attribute {name!r}")
    from inl.errors import MissingPackage
    from inl.install_command import install_command

    try:
        from inl_ray.batches import map_batches
    except ImportError as error:
        raise MissingPackage(
            f"{error.name}, which Ray Data needs, is not installed. "
            f"Try: {install_command('inl-ray[data]')}"
        ) from error
    return map_batches
