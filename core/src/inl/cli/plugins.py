"""``inl plugins``: installed plugins and their status."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from inl.cli.table import print_table
from inl.plugin import registry


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List every plugin; a broken plugin is shown with its error."""
    rows = registry().plugins
    if as_json:
        print(json.dumps([row._asdict() for row in rows], ensure_ascii=False))
        return
    heads = "plugin", "package", "status", "detail"
    cells = [(row.name, row.package, row.status, row.detail) for row in rows]
    print_table(heads, cells)
