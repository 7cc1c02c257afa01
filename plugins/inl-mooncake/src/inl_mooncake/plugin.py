"""Entry point ``mooncake``: registers the store without importing Mooncake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterStore


@hookimpl
def inl_register_stores(register: RegisterStore) -> None:
    register("mooncake", "inl_mooncake.store:MooncakeStore")
