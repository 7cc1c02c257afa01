"""Chunks of streamed chat and text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.serve.event_stream import DONE, encode, event
from inl.serve.openai.usage import usage_body

if TYPE_CHECKING:
    from inl.serve.api_error import ApiError
    from inl.serve.dialect import ReadUsage
    from inl.serve.job import Usage
    from inl.serve.openai.fields import StreamOptions


class Chunks:
    """Writes the chunks of one response.

    head: fields that all chunks share; they are encoded once.
    """

    def __init__(self, head: dict[str, Any], options: StreamOptions) -> None:
        self._head = b"data: " + encode(head).removesuffix(b"}")
        self._options = options

    def chunk(self, choice: dict[str, Any], usage: ReadUsage) -> bytes:
        """Return a chunk with one choice."""
        body = b',"choices":[' + encode(choice) + b"]"
        if self._options.continuous_usage_stats:
            body += b',"usage":' + encode(usage_body(usage()))
        elif self._options.include_usage:
            body += b',"usage":null'
        return self._head + body + b"}\n\n"

    def closing(self, usage: Usage) -> bytes:
        """Return the usage, if it was asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        body = b',"choices":[],"usage":' + encode(usage_body(usage))
        return self._head + body + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        return event(error.openai()) + DONE
