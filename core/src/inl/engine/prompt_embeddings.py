"""Embeddings that stand for tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from operator import countOf
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import HostArray
from inl.errors import RequestError
from inl.scheduling.embedded_positions import EmbeddedPositions
from inl.spec.embedded_rows import host_floats, is_finite

if TYPE_CHECKING:
    from inl.spec.embedded_rows import Floats

PLACEHOLDER = 0
"""Token id at the positions of embeddings; it is not looked up."""


class PromptEmbeddings(EmbeddedPositions):
    """The embeddings of a prompt, in order of position.

    spans: arrays [n, H] by their first position, of which those of
    :class:`~inl.dtypes.HostArray` keep their 16 bits. Raises
    :class:`~inl.errors.RequestError` for spans that overlap or are outside of the
    prompt, rows of different widths, and what is not a finite array.
    """

    def __init__(self, spans: Mapping[int, Any], prompt_tokens: int) -> None:
        self._rows: dict[int, Floats] = {}
        self._width = 0
        for start, rows in sorted(spans.items()):
            self._add(start, read_rows(rows, f"embeddings at {start}"), prompt_tokens)

    def _add(self, start: int, rows: Floats, prompt_tokens: int) -> None:
        stop = start + len(rows)
        if not 0 <= start < stop <= prompt_tokens or start in self._rows:
            raise RequestError(
                f"embeddings: found {len(rows)} rows at {start}, accepts rows that do "
                f"not overlap, in a prompt of {prompt_tokens} tokens"
            )
        if self._rows and rows.shape[1] != self.width:
            raise RequestError(
                f"embeddings at {start}: found rows of {rows.shape[1]}, others have "
                f"{self.width}"
            )
        self._width = rows.shape[1]
        if not self._rows.keys().isdisjoint(range(start, stop)):
            raise RequestError(f"embeddings at {start}: overlap others")
        self._rows |= zip(range(start, stop), rows, strict=True)

    @property
    def width(self) -> int:
        return self._width

    @property
    def moves(self) -> bool:
        return False

    @property
    def longest_span(self) -> int:
        return 0

    def whole(self, position: int) -> int:
        return position

    def __contains__(self, position: int, /) -> bool:
        return position in self._rows

    def between(self, start: int, stop: int) -> dict[int, Floats]:
        """Return the rows of positions ``start`` to ``stop - 1``, by position."""
        positions = range(start, stop)
        return {at: self._rows[at] for at in positions if at in self._rows}

    def digest(self, start: int, stop: int) -> bytes:
        found = self.between(start, stop)
        parts = (
            (at - start).to_bytes(4, "little") + sha256(row.tobytes()).digest()
            for at, row in found.items()
        )
        return sha256(b"".join(parts)).digest() if found else b""


def is_rows(value: Any) -> bool:
    """Whether a part of a prompt is an array of embeddings, of any framework."""
    return getattr(value, "ndim", 0) == 2


def read_rows(value: Any, what: str) -> Floats:
    """Return embeddings [n, H], in float32 but for a ``HostArray``.

    Raises :class:`~inl.errors.RequestError`.
    """
    try:
        rows = (
            host_floats(value)
            if isinstance(value, HostArray)
            else np.array(value, np.float32, order="C")
        )
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what}: {error}; accepts an array [n, hidden]") from error
    if rows.ndim != 2 or not rows.size:
        raise RequestError(
            f"{what}: found shape {list(rows.shape)}, accepts [n, hidden] with one row "
            "or more"
        )
    if not is_finite(rows):
        raise RequestError(f"{what}: found NaN or infinity, accepts finite numbers")
    return rows


def split_prompt(parts: list[Any]) -> tuple[list[Any], PromptEmbeddings | None]:
    """Return token ids, with placeholders, and the embeddings if there are any."""
    if countOf(map(type, parts), int) == len(parts):
        return parts, None
    ids: list[Any] = []
    spans: dict[int, Floats] = {}
    for index, part in enumerate(parts):
        if not is_rows(part):
            ids.append(part)
            continue
        rows = spans[len(ids)] = read_rows(part, f"prompt[{index}]")
        ids += [PLACEHOLDER] * len(rows)
    return ids, PromptEmbeddings(spans, len(ids)) if spans else None
