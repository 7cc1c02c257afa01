"""Entry point ``ray``: registers the place without importing Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterPlace


@hookimpl
def inl_register_places(register: RegisterPlace) -> None:
    register("ray", "inl_ray.place:start", devices="inl_ray.cluster:devices")
