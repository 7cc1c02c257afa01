"""Errors that a response reports, and the shape of each dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from inl.errors import (
    InlError,
    MissingPackage,
    PromptTooLong,
    QueueFull,
    RequestError,
    TemplateError,
)
from inl.errors import message as message_of

OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}

ANTHROPIC_TYPES = {**OPENAI_TYPES, 413: "request_too_large"}

FIELD = re.compile(r"([a-z][a-z0-9_]*)(\[\d+\])*:")
"""Beginning of an error message that names a field."""


class ApiError(Exception):
    """An error with its HTTP status.

    param: the field that is not accepted. retry_after: seconds after which the same
    request may be accepted.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # It may have the path of a file, which may have any bytes.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def openai(self) -> dict[str, Any]:
        """Return the body that clients of OpenAI's API expect."""
        return {
            "error": {
                "message": self.message,
                "type": OPENAI_TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """Return the body that clients of Anthropic's API expect."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def ollama(self) -> dict[str, Any]:
        """Return the body that clients of Ollama's API expect."""
        return {"error": self.message}


def unsupported(field: str, reason: str) -> ApiError:
    """Return the error for a field with a value that is not supported."""
    return ApiError(
        400, f"{field}: {reason}", param=field, code="unsupported_parameter"
    )


def model_not_found(name: str, known: Iterable[str]) -> ApiError:
    """Return the error for the name of a model that is not known."""
    return ApiError(
        404,
        f"model: found {name!r:.80}, this server has {', '.join(known)}",
        param="model",
        code="model_not_found",
    )


def as_api_error(error: BaseException) -> ApiError:
    """Convert an error of the engine."""
    if isinstance(error, ApiError):
        return error
    text = message_of(error)
    if isinstance(error, QueueFull):
        return ApiError(503, text, code="queue_full", retry_after=1)
    if isinstance(error.__cause__, OSError) and isinstance(
        error, RequestError | TemplateError
    ):
        return ApiError(503, text, code="process_failed", retry_after=1)
    if isinstance(error, RequestError | TemplateError):
        named = FIELD.match(text)
        too_long = isinstance(error, PromptTooLong)
        code = "context_length_exceeded" if too_long else "invalid_value"
        return ApiError(400, text, param=named and named[1], code=code)
    if isinstance(error, MissingPackage):
        return ApiError(400, text, code="unsupported_parameter")
    if isinstance(error, InlError):
        return ApiError(500, text, code="engine_error")
    return ApiError(500, "internal error; the log of the server has its traceback")
