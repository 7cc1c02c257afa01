"""Registers the place ``ssh:[USER@]HOST/DEVICE``."""

from inl.plugin import hookimpl


@hookimpl
def inl_register_places(register):
    register("ssh", "inl_ssh.place:start")
