"""Chunks of streamed chat and text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.serve.event_stream import DONE, EVENTS, encode, event
from inl.serve.openai.usage import usage_body
from inl.serve.resuming import ResumableExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inl.serve.api_error import ApiError
    from inl.serve.dialect import ReadUsage
    from inl.serve.job import Answer, Usage
    from inl.serve.openai.fields import StreamOptions
    from inl.serve.resuming import Origin


class ChunkedExchange(ResumableExchange):
    """Writes chat and text completions in chunks; each sets all attributes."""

    stream_format = EVENTS
    head: dict[str, Any]
    """Fields that a response begins with."""
    chunk_head: bytes
    """Those of a chunk, encoded."""
    chunk_object: str
    """The kind of a chunk."""
    stream_options: StreamOptions

    def begin(self, head: dict[str, Any]) -> None:
        """Set the fields that the response begins with."""
        self.head = head
        fields = {**head, "object": self.chunk_object}
        self.chunk_head = b"data: " + encode(fields).removesuffix(b"}")

    def restore(self, origin: Origin) -> None:
        """Use the time of the request that has begun the answer."""
        self.begin({**self.head, "created": origin.created})

    def count_from(self, events: int) -> None:
        """Do nothing: chunks have no numbers."""

    def chunk(self, choice: dict[str, Any], usage: ReadUsage) -> bytes:
        """Return a chunk with one choice."""
        body = b',"choices":[' + encode(choice) + b"]"
        if self.stream_options.continuous_usage_stats:
            body += b',"usage":' + encode(usage_body(usage()))
        elif self.stream_options.include_usage:
            body += b',"usage":null'
        return self.chunk_head + body + b"}\n\n"

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the usage, if it was asked for, and the end mark."""
        del answers
        if not self.stream_options.include_usage:
            return DONE
        body = b',"choices":[],"usage":' + encode(usage_body(usage))
        return self.chunk_head + body + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        return event(error.openai()) + DONE
