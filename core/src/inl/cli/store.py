"""``inl pull``, ``list`` and ``rm``: models in the caches of this machine."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from inl.checkpoints.hub.resolve import resolve_model
from inl.checkpoints.hub.stored import remove_files, size_of, stored_files
from inl.cli import arguments
from inl.cli.devices import show_bytes
from inl.cli.models import cached_models
from inl.cli.table import print_table
from inl.errors import RequestError

Name = Annotated[
    str,
    typer.Argument(
        help="Short name such as llama3.2:1b, org/name or org/name:Q4_K_M of Hugging "
        "Face, also behind hf.co/."
    ),
]


def pull(name: Name) -> None:
    """Download the model NAME and print its path. A cached one is kept."""
    print(resolve_model(name))


def list_models(as_json: arguments.Json = False) -> None:
    """List the models in the caches, with their sizes and times."""
    found = [row for row in cached_models() if row["state"] == "cached"]
    rows = [
        {
            "name": row["name"],
            "bytes": row["bytes"],
            "modified": _modified(Path(row["place"])),
        }
        for row in found
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    cells = [(row["name"], show_bytes(row["bytes"]), row["modified"]) for row in rows]
    print_table(("name", "size", "modified"), cells)


def _modified(place: Path) -> str:
    """Return the local time at which a file, or the newest of a folder, changed."""
    files = [place, *place.glob("blobs/*")] if place.is_dir() else [place]
    newest = max(path.stat().st_mtime for path in files)
    return datetime.fromtimestamp(newest).astimezone().isoformat(" ", "minutes")


def rm(
    name: Name,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove without asking.")
    ] = False,
) -> None:
    """Remove the model NAME from its cache, after a question."""
    files = stored_files(name)
    size = show_bytes(size_of(files))
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError(
                f"{name}: {size}; nobody can be asked here; to remove it: "
                f"inl rm {name} --yes"
            )
        typer.confirm(f"remove {name}, {size}?", abort=True, err=True)
    remove_files(files)
    print(f"removed {name}, {size} freed")
