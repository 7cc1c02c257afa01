"""The place ``join:HOST:PORT/DEVICE``: a worker that somebody starts by hand."""

from __future__ import annotations

import logging

from inl.errors import DeviceError
from inl.workers.place import Request
from inl.workers.settings import MAKE_SECRET, SECRET, SECRET_FILE

log = logging.getLogger("inl")


class ByHand:
    """A worker that is not this process's to start or stop."""

    alive = True
    log_tail = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def stop(self, seconds: float) -> None:
        """Do nothing: it ends when its connection is closed."""


def wait_for_worker(request: Request) -> ByHand:
    """Open the port, and log the command that joins it.

    Raises :class:`~inl.errors.DeviceError` without a secret.
    """
    if request.shared_secret is None:
        raise DeviceError(
            f"device join:{request.target}: found no secret, by which engine and "
            f"worker know each other; set {SECRET_FILE} to a private file, or "
            f"{SECRET}, here and there; {MAKE_SECRET}"
        )
    address = request.listen(request.target)
    log.info("waiting for worker %d: inl worker %s", request.seat, address)
    return ByHand(f"{request.seat} of {address}")
