"""``inl new-plugin``: creates a package with a working backend to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inl.install_command import pip_command
from inl.testing.scaffold import create


def run(
    name: Annotated[str, typer.Argument(help='Device type, such as "npu".')],
    path: Annotated[
        Path, typer.Option(help="Parent folder of the new package.")
    ] = Path(),
    license: Annotated[  # noqa: A002
        str, typer.Option(help="Apache-2.0, MIT or none.")
    ] = "Apache-2.0",
    style: Annotated[
        str, typer.Option(help="eager (op by op) or traced (jax.jit).")
    ] = "eager",
) -> None:
    """Create a package inl-NAME with a backend to start from."""
    folder = create(name, path, license, style)
    print(f"created {folder}; next:")
    print(f"  {pip_command('install')} -e '{folder}[test]'")
    print(f"  inl check {name}:0")
    print(f"  pytest {folder}")
