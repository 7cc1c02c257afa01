"""``inl pipe``: answers a program in another language on the standard streams."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def run() -> None:
    """Serve one program by frames on standard input and output.

    The program opens a model and streams requests; see docs/callers.md.
    """
    from inl.callers.session import Session

    # Whatever prints, here or in a library, must not write into the frames.
    with (
        os.fdopen(os.dup(0), "rb") as source,
        os.fdopen(os.dup(1), "wb") as sink,
        Path(os.devnull).open("rb") as nothing,
    ):
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        if not Session(source, sink).run():
            raise typer.Exit(2)
