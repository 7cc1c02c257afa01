"""``inl new-plugin``: a package with a backend that works, to be changed from there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inl.testing.scaffold import create


def run(
    name: Annotated[str, typer.Argument(help='Device type, such as "npu".')],
    path: Annotated[
        Path, typer.Option(help="Folder in which the package's own folder is made.")
    ] = Path(),
    license: Annotated[  # noqa: A002
        str, typer.Option(help="Apache-2.0, MIT or none.")
    ] = "Apache-2.0",
) -> None:
    """Write a package inl-NAME with a backend whose tests pass."""
    folder = create(name, path, license)
    print(f"made {folder}; next:")
    print(f"  pip install -e '{folder}[test]'")
    print(f"  inl check {name}:0")
    print(f"  pytest {folder}")
