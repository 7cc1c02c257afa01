"""Devices of one kind by name, from inl-toolkit."""

from inl.toolkit import alias

alias(__name__)
