"""Several processes, usually one per host, whose devices form one mesh."""

from __future__ import annotations

import os

import jax

from inl.errors import BackendUnavailable

COORDINATOR, PROCESSES, PROCESS = "INL_COORDINATOR", "INL_PROCESSES", "INL_PROCESS_ID"
"""Environment variables: HOST:PORT of process 0, the number of processes, and the index
of this one. On Cloud TPUs only the first, "auto"."""


def join(platform: str) -> None:
    """Join the processes that the environment names; does nothing without any.

    Call it before JAX has made its devices. Every process must then run the same
    program. Raises :class:`~inl.errors.BackendUnavailable` for invalid settings, and
    where the other processes do not answer.
    """
    address = os.environ.get(COORDINATOR)
    if not address or jax.distributed.is_initialized():
        return
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if address == "auto":
            jax.distributed.initialize()
        else:
            count, index = _number(PROCESSES, 1), _number(PROCESS, 0)
            jax.distributed.initialize(address, count, index)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BackendUnavailable(
            f"{COORDINATOR}={address}: JAX cannot join the processes: {reason}"
        ) from error


def _number(name: str, least: int) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise BackendUnavailable(
            f"environment variable {name}: found {text!r:.80}; {COORDINATOR} needs a "
            f"whole number of {least} or more"
        )
    return int(text)
