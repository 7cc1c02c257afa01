"""Chunks of streamed chat and text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.serve.event_stream import DONE, EVENTS, encode, event
from inl.serve.openai.usage import usage_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inl.serve.api_error import ApiError
    from inl.serve.dialect import ReadUsage
    from inl.serve.job import Answer, Usage
    from inl.serve.openai.fields import StreamOptions


def chunk_head(fields: dict[str, Any]) -> bytes:
    """Return the encoded fields that all chunks of a response share."""
    return b"data: " + encode(fields).removesuffix(b"}")


class ChunkedExchange:
    """Writes chat and text completions in chunks; each sets both attributes."""

    stream_format = EVENTS
    encoded_head: bytes
    """Of :func:`chunk_head`."""
    stream_options: StreamOptions

    def chunk(self, choice: dict[str, Any], usage: ReadUsage) -> bytes:
        """Return a chunk with one choice."""
        body = b',"choices":[' + encode(choice) + b"]"
        if self.stream_options.continuous_usage_stats:
            body += b',"usage":' + encode(usage_body(usage()))
        elif self.stream_options.include_usage:
            body += b',"usage":null'
        return self.encoded_head + body + b"}\n\n"

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the usage, if it was asked for, and the end mark."""
        del answers
        if not self.stream_options.include_usage:
            return DONE
        body = b',"choices":[],"usage":' + encode(usage_body(usage))
        return self.encoded_head + body + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return an error in mid-stream."""
        return event(error.openai()) + DONE
