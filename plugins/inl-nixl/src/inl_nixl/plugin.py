"""Entry point ``nixl``: registers the transport without importing NIXL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterTransport


@hookimpl
def inl_register_transports(register: RegisterTransport) -> None:
    register("nixl", "inl_nixl.transport:NixlTransport")
