"""One structured log line for each request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from inl.serve.job import Phases, Usage

log = logging.getLogger("inl.serve.access")


class Record:
    """What is logged of one request."""

    def __init__(self, number: str, method: str, path: str) -> None:
        self.number = number
        self.method = method
        self.path = path
        self.model: str | None = None
        self.status = 0
        self.body_bytes = 0
        """Size of the body that has been received."""
        self.seconds = 0.0
        """Time from the request to its end, once it is finished."""
        self.usage: Usage | None = None
        self.reasons: Sequence[str] = ()
        self.error: str | None = None
        """Code of the error that ended the request; its answer has no end then."""
        self.phases: Phases | None = None
        """Times of the first completion."""
        self._started = time.perf_counter()
        self._first: float | None = None

    def began(self) -> None:
        """Record the time of the first token."""
        if self._first is None:
            self._first = time.perf_counter() - self._started

    def finish(self) -> None:
        """Record the end of the request."""
        self.seconds = time.perf_counter() - self._started

    def write(self) -> None:
        """Log the finished request as one JSON object."""
        fields: dict[str, Any] = {
            "request": self.number,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 4),
        }
        if self._first is not None:
            fields["first_token_seconds"] = round(self._first, 4)
        if self.usage is not None:
            fields["prompt_tokens"] = self.usage.prompt_tokens
            fields["cached_tokens"] = self.usage.cached_tokens
            fields["completion_tokens"] = self.usage.completion_tokens
        if self.reasons:
            fields["finish_reasons"] = list(self.reasons)
        if self.error is not None:
            fields["error"] = self.error
        log.info("%s", json.dumps(fields))
