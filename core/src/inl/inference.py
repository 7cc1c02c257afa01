"""The engine under the names of replaced systems, from inl-toolkit."""

from inl.toolkit import alias

alias(__name__)
