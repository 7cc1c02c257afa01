"""The error that clients get of a model that cannot be loaded."""

from __future__ import annotations

import logging

from inl.errors import DeviceError, InlError, ModelError, OutOfMemory
from inl.errors import message as message_of
from inl.serve.api_error import ApiError

log = logging.getLogger("inl.serve")

LOAD_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemory, "there is not enough memory"),
    (MemoryError, "there is not enough memory"),
    (DeviceError, "its device is not available"),
    (ModelError, "its files cannot be used"),
    (OSError, "its files cannot be read"),
    (InlError, "it does not accept the settings of the server"),
)
"""Kind of error -> reason in the answer to clients; the first match counts."""


def load_failure(name: str, error: Exception) -> ApiError:
    """Log that a model could not be loaded, and return the error for clients."""
    trace = None if isinstance(error, InlError) else error
    log.error("model %s: loading failed: %s", name, message_of(error), exc_info=trace)
    return ApiError(
        503,
        f"model: {name!r} could not be loaded: {_plain(error)}; the log of the server "
        "says more",
        param="model",
        code="model_load_failed",
    )


def _plain(error: Exception) -> str:
    """Return the kind of an error. Its message may have paths of this machine."""
    for kind, text in LOAD_FAILURES:
        if isinstance(error, kind):
            return text
    return "internal error"
