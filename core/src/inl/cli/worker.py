"""``inl worker``: computes for an engine of another host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from inl.errors import DeviceError


def run(
    address: Annotated[str, typer.Argument(help="Of the engine, as HOST:PORT.")],
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="Private file with the engine's secret, 64 hexadecimal digits. "
            "[default: that of INL_WORKER_SECRET_FILE, or INL_WORKER_SECRET]"
        ),
    ] = None,
    seat: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65534,
            metavar="N",
            help="Number of the worker. [default: that of its launcher, or free]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Such as cuda:1. [default: by the launcher's number of the worker on "
            "its host, or the one that the engine names]"
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds for the engine to listen.")
    ] = 60.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Join an engine of another host without encryption."
        ),
    ] = False,
) -> None:
    """Compute for the engine at ADDRESS, on this or another host."""
    from inl.runners.worker_main import end_process, serve_engine
    from inl.workers.handshake import ANY_SEAT
    from inl.workers.launchers import read_launcher
    from inl.workers.settings import INSECURE, SECRET, SECRET_FILE, read_secret

    if insecure:
        os.environ[INSECURE] = "1"
    names = {SECRET_FILE: str(secret_file)} if secret_file else os.environ
    secret = read_secret(names)
    if secret is None:
        raise DeviceError(
            f"--secret-file: found none, and neither {SECRET_FILE} nor {SECRET}; "
            "accepted: the secret of the engine"
        )
    for name in (SECRET, SECRET_FILE):  # not for processes that libraries start
        os.environ.pop(name, None)
    number, local = seat, None
    if seat is None:
        number, local = read_launcher(os.environ)
    number = ANY_SEAT if number is None else number
    serve_engine(address, secret, number, seconds=wait, device=device, local=local)
    end_process(0)
