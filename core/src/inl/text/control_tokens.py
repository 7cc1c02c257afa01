"""Control tokens in messages: encoded as plain text, while the template's stay special.

Before a conversation is rendered, a mark is put into every text of a message, tool,
document or template variable that reads like a control token, behind its first
character. A control token of the rendered text
is the template's own if it contains no mark. Marks are removed before encoding.

Messages without such a text are rendered unchanged. The mark survives trimming, changes
of case and splitting; a template that searches a message for a control token does not
find it, and one that builds a control token of its own text and that of a message
("<|" + role + "|>") still does.
"""

from __future__ import annotations

import bisect
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Code points that are never assigned to characters, for use within a process."""


PIECE = 1 << 16
"""Characters that are searched at a time."""


class MarkedMessages:
    """Variables of a template with marks in what reads like a control token.

    texts: the control tokens, regardless of case, as a template may change it.
    """

    def __init__(self, values: Mapping[str, Any], texts: Sequence[str]) -> None:
        # Random, so that no message can contain it; digits have no case.
        self.mark = f"{OPEN}{secrets.randbelow(10**15):015}{CLOSE}"
        self._begins = re.compile(f"(?={_any_of(texts)})", re.IGNORECASE)
        self._prefixes = {
            text[:length].lower() for text in texts for length in range(1, len(text))
        }
        self._longest = max(map(len, self._prefixes), default=0)
        self.any = False
        """Whether a mark was put anywhere."""
        self.values = {name: self._marked(value) for name, value in values.items()}

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            marked = self._text(value)
            self.any |= marked != value
            return marked
        if isinstance(value, Mapping):
            return {self._key(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    def _key(self, key: Any) -> Any:
        """Mark control tokens in a key, which a template may write as JSON."""
        if not isinstance(key, str):
            return key
        marked = self._insert(key, self._places(key))
        self.any |= marked != key
        return marked

    def _places(self, text: str) -> list[int]:
        """Return the places behind each first character; other threads run meanwhile.

        A piece of the text is searched at a time, with what a control token that begins
        in it may need of the next one.
        """
        return [
            match.start() + 1
            for start in range(0, len(text), PIECE)
            for match in self._begins.finditer(
                text, start, start + PIECE + self._longest
            )
            if match.start() < start + PIECE
        ]

    def _insert(self, text: str, places: Sequence[int]) -> str:
        parts = [text[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
        return self.mark.join(parts)

    def _text(self, text: str) -> str:
        """Mark control tokens, and a begun one at the end that another text may end."""
        places = self._places(text)
        stop = len(text.rstrip())
        tail = text[max(stop - self._longest, 0) : stop].lower()
        if any(tail[at:] in self._prefixes for at in range(len(tail))):
            places.append(stop)
        return self._insert(text, places)


def encode_marked(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Encode a rendered conversation; control tokens with a mark are plain text."""
    escaped = mark.replace(OPEN, r"\\ufdd0").replace(CLOSE, r"\\ufdd1")  # by tojson
    parts = re.split(f"{mark}|{escaped}", text, flags=re.IGNORECASE)
    marks = list(accumulate(map(len, parts[:-1])))
    text = "".join(parts)
    ids: list[int] = []
    begin = 0
    for start, stop in _plain_spans(text, marks, tokenizer.control_tokens):
        ids += tokenizer.encode(text[begin:start], add_special=False)
        ids += tokenizer.encode(text[start:stop], add_special=False, plain=True)
        begin = stop
    return ids + tokenizer.encode(text[begin:], add_special=False)


def _plain_spans(
    text: str, marks: Sequence[int], texts: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Yield the spans with marks between two control tokens of the template."""
    pattern = re.compile(_any_of(texts))
    begin = at = 0
    while match := pattern.search(text, at):
        start, stop = match.span()
        inside = bisect.bisect_left(marks, stop) > bisect.bisect_right(marks, start)
        at = start + 1 if inside else stop
        if not inside:
            if _has(marks, begin, start):
                yield begin, start
            begin = stop
    if _has(marks, begin, len(text)):
        yield begin, len(text)


def _has(marks: Sequence[int], start: int, stop: int) -> bool:
    return bisect.bisect_left(marks, start) < bisect.bisect_right(marks, stop)


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern of any of the texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"
