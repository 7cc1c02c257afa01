"""A batch, as it is stored and as the API describes it."""

from __future__ import annotations

from typing import Any

import msgspec

ENDED = ("completed", "failed", "expired", "cancelled")
"""Statuses that do not change."""

TIMES = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip


class Batch(msgspec.Struct):
    """A file of requests that is being answered, or was."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    metadata: dict[str, Any] | None = None
    status: str = "validating"
    times: dict[str, int] = {}  # msgspec copies it
    """When it got each status, by name of the field."""
    errors: list[dict[str, Any]] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    after: str = ""
    """Status that it gets once it is finalized, of :data:`ENDED`."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in ENDED

    def body(self) -> dict[str, Any]:
        """Return the batch as the API describes it."""
        times = {name: self.times.get(name) for name in TIMES}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **times,
            "expires_at": self.expires_at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }
