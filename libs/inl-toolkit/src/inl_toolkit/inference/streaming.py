"""Streams in tokens, words, sentences or chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack, final

from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.options import GenerationOptions, Prompt

ENDS = {
    "word": re.compile(r"\S\s+(?=\S)"),
    "sentence": re.compile(r"(?:[.!?…][\"'”’)\]]*\s+|\n+)(?=\S)"),
}
"""What ends a unit, once the next one has begun."""
UNITS = ("token", *ENDS, "chunk")


@final
class StreamingSession:
    """Iterates over a completion as it is generated; the pieces joined are its text.

    unit: "token" (the text that a step completes, in whole characters), "word" and
    "sentence" (with the space after them), or "chunk" (``chunk_size`` characters).
    Closing it, or leaving its ``with`` block, cancels the request. options: as in
    :meth:`InferenceEngine.stream`, which raises the same errors.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        prompt: Prompt,
        *,
        unit: str = "token",
        chunk_size: int = 64,
        **options: Unpack[GenerationOptions],
    ) -> None:
        if unit not in UNITS:
            raise RequestError(
                f"unit: found {unit!r:.80}, accepted: {', '.join(UNITS)}"
            )
        if type(chunk_size) is not int or chunk_size < 1:
            raise RequestError(f"chunk_size: found {chunk_size!r}, accepted: 1 or more")
        self._pieces = engine.stream(prompt, **options)
        self._units = units(self._pieces, unit, chunk_size)

    def __iter__(self) -> Iterator[str]:
        return self._units

    def close(self) -> None:
        """Cancel the request if it has not finished."""
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> StreamingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def units(pieces: Iterator[str], unit: str, chunk_size: int) -> Iterator[str]:
    """Regroup pieces of text; the results joined are the pieces joined."""
    if unit == "token":
        yield from pieces
        return
    pending = ""
    for piece in pieces:
        pending += piece
        while cut := _end(pending, unit, chunk_size):
            yield pending[:cut]
            pending = pending[cut:]
    if pending:
        yield pending


def _end(text: str, unit: str, chunk_size: int) -> int:
    """Return the length of the first whole unit of ``text``, 0 if there is none."""
    if unit == "chunk":
        return chunk_size if len(text) >= chunk_size else 0
    found = ENDS[unit].search(text)
    return found.end() if found else 0
