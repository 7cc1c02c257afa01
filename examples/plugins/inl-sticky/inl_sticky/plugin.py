"""Registers the router ``inl serve --replica ... --router sticky``."""

from inl.plugin import hookimpl


@hookimpl
def inl_register_routers(register):
    register("sticky", "inl_sticky.router:Sticky")
