"""Kernels on arrays of any framework, from inl-toolkit."""

from inl.toolkit import alias

alias(__name__)
