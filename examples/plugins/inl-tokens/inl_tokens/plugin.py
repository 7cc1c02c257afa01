"""Registers the command."""

from inl.plugin import hookimpl


@hookimpl
def inl_register_commands(register):
    register("tokens", "inl_tokens.command:run", "Count the tokens of FILES.")
