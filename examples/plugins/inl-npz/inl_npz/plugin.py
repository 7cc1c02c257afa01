"""Registers the reader of ``.npz`` files."""

from inl.plugin import hookimpl


@hookimpl
def inl_register_formats(register):
    register(".npz", "inl_npz.reader:NpzCheckpoint")
