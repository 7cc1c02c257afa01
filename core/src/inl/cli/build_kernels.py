"""``inl build-kernels``: compiles native libraries where backends are installed."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Annotated

import typer

from inl.cli.progress import counting_bar
from inl.errors import MissingPackage
from inl.install_command import install_command
from inl.plugin import registry
from inl.plugin.contribution import resolve


def run(
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="All instruction sets, not only those of this processor."
        ),
    ] = False,
) -> None:
    """Compile native kernels where they are installed."""
    known = registry()
    entries = (known.backend(kind) for kind in known.types)
    origins = {entry.origin.module: entry.origin for entry in entries if entry}
    built = 0
    for module, origin in origins.items():
        name, _, path = module.partition(":")
        plugin = attrgetter(path)(import_module(name)) if path else import_module(name)
        target = getattr(plugin, "INL_BUILD_KERNELS", None)
        if target is None:
            continue
        build = resolve(origin, "the build of its kernels", target)
        print(build(every=every, report=counting_bar("compiling")))
        built += 1
    if not built:
        raise MissingPackage(
            "no installed backend has kernels to compile. Try: "
            + install_command("inl-cpu")
        )
