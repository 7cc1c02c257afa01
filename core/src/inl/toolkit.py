"""Packages of the distribution inl-toolkit under their names in ``inl``."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import walk_packages

from inl.errors import MissingPackage
from inl.install_command import install_command


def alias(name: str) -> None:
    """Make a module of ``inl`` and its submodules those of ``inl_toolkit``.

    They are the same objects under both names: a second copy would have classes and
    settings of its own. Raises :class:`~inl.errors.MissingPackage` without inl-toolkit.
    """
    try:
        package = import_module(_original(name))
    except ModuleNotFoundError as error:
        if error.name != "inl_toolkit":
            raise
        raise MissingPackage(
            f"inl-toolkit, which has {name}, is not installed. Try: "
            + install_command("inl-toolkit")
        ) from error
    sys.modules[name] = package
    for part in walk_packages(package.__path__, f"{name}."):
        sys.modules[part.name] = import_module(_original(part.name))


def _original(name: str) -> str:
    return name.replace("inl", "inl_toolkit", 1)
