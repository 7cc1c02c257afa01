"""Splits text with a model's markup into content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from inl.serve.job import CallDelta, Delta
from inl.serve.markup import CallMarkup, ReasoningMarkup

DECODER = json.JSONDecoder()


class MarkupParser:
    """Parses the text of one completion as it arrives.

    Text that may be the beginning of a mark is held back. calls, reasoning: ``None`` if
    there are none. is_reasoning: whether the prompt has begun the reasoning. is_forced:
    whether the text, behind the reasoning, is one call without marks.
    """

    def __init__(
        self,
        calls: CallMarkup | None,
        reasoning: ReasoningMarkup | None,
        *,
        is_reasoning: bool = False,
        is_forced: bool = False,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._state = "reasoning" if is_reasoning else "content"
        self.reasoning_end: int | None = None if is_reasoning else 0
        """Characters up to the end of the reasoning; ``None`` while it lasts."""
        self._held = ""
        self._fed = 0
        self._count = 0
        self._call: _CallText | None = None
        self._markup_end = ""
        self._skipped: str | None = ""
        """Mark that is dropped if it comes next, and white space around it."""
        self._is_start = True
        """Whether nothing but white space was content so far."""
        self._is_forced = is_forced
        if is_forced and calls is not None and not is_reasoning:
            self._begin_call(calls)

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was found."""
        return self._count > 0

    def feed(self, text: str) -> Delta:
        """Return the parts of the next text that are certain."""
        delta = Delta()
        self._held += text
        self._fed += len(text)
        while self._held and self._advance(delta):
            """Each round ends at a mark."""
        return delta

    def finish(self) -> Delta:
        """Return the rest: no more text will follow."""
        delta, rest = Delta(), self._held
        self._held = ""
        if self._skipped is not None and self._call is None:
            return delta  # white space, or a mark that was cut off
        if self._state == "reasoning":
            delta.reasoning = rest
        elif self._call is not None:
            unparsed = self._call.finish(rest)
            delta.content = unparsed
        else:
            delta.content = rest
        return delta

    def _advance(self, delta: Delta) -> bool:
        """Parse up to the next mark; returns whether there was one."""
        if self._skipped is not None and not self._skip(self._skipped):
            return False
        if self._state == "reasoning":
            return self._advance_reasoning(delta)
        if self._call is not None:
            return self._advance_call(delta, self._call)
        return self._advance_content(delta)

    def _skip(self, mark: str) -> bool:
        """Drop white space and a mark; returns whether more text follows."""
        text = self._held.lstrip()
        if mark.startswith(text) and text != mark:
            return False
        self._held = text.removeprefix(mark).lstrip()
        self._skipped = None if self._held else ""
        return bool(self._held)

    def _advance_reasoning(self, delta: Delta) -> bool:
        assert self._reasoning is not None, "reasoning has a mark"
        text, found = self._take_until((self._reasoning.end,))
        delta.reasoning += text
        if found:
            self._state, self._skipped = "content", ""
            self.reasoning_end = self._fed - len(self._held)
            if self._is_forced and self._calls is not None:
                self._begin_call(self._calls)
        return bool(found)

    def _advance_content(self, delta: Delta) -> bool:
        calls, reasoning = self._calls, self._reasoning
        if calls is not None and not calls.begin and self._is_start:
            self._is_start = False
            if self._held.startswith("{"):
                self._begin_call(calls)
                return True
        marks = [calls.begin] if calls is not None and calls.begin else []
        if reasoning is not None and self._is_start:
            marks.append(reasoning.begin)
        text, found = self._take_until(tuple(marks))
        self._is_start = self._is_start and not text
        delta.content += "" if found and not text.strip() else text
        if reasoning is not None and found == reasoning.begin:
            self._state, self._skipped = "reasoning", ""
            self.reasoning_end = None
        elif found and calls is not None:
            self._begin_call(calls)
        return bool(found)

    def _begin_call(self, calls: CallMarkup) -> None:
        self._call = _CallText(calls, self._count)
        self._markup_end = calls.end

    def _advance_call(self, delta: Delta, call: _CallText) -> bool:
        text, self._held = self._held, ""
        parts, rest = call.feed(text)
        delta.calls = [*delta.calls, *parts]
        self._count = max(self._count, call.index + len(call.started))
        if rest is None:
            return False
        self._call, self._held = None, rest
        self._skipped = self._markup_end
        return True

    def _take_until(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Remove text before the first mark, and the mark; returns both."""
        places = [(self._held.find(mark), mark) for mark in marks]
        found = min((each for each in places if each[0] >= 0), default=None)
        if found is not None:
            place, mark = found
            text, self._held = self._held[:place], self._held[place + len(mark) :]
            return text, mark
        held = max((_overlap(self._held, mark) for mark in marks), default=0)
        stop = len(self._held) - held
        text, self._held = self._held[:stop], self._held[stop:]
        return text, ""


class _CallText:
    """The text of a call, or of a list of calls, up to its end mark.

    The arguments are passed on as they arrive where the name precedes them.
    """

    def __init__(self, markup: CallMarkup, index: int) -> None:
        self.index = index
        self.started: list[str] = []
        """Ids of the calls so far."""
        name, arguments = re.escape(markup.name_key), re.escape(markup.arguments_key)
        self._head = re.compile(
            rf'\s*\{{\s*"{name}"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{arguments}"\s*:\s*'
            r"(?=\{)"
        )
        self._markup = markup
        self._text = ""
        self._sent = 0
        """Characters of the arguments that were passed on."""
        self._arguments: int | None = None
        self._scanner = _Nesting()

    def feed(self, text: str) -> tuple[list[CallDelta], str | None]:
        """Return the parts of calls, and what follows them once they have ended."""
        self._text += text
        if self._arguments is None:
            head = self._head.match(self._text)
            if head is None:
                return self._whole()
            self._arguments = self._sent = head.end()
            start = self._start(json.loads(head[1]))
            rest, ended = self._stream()
            return [start, *rest], ended
        return self._stream()

    def finish(self, rest: str) -> str:
        """Return the text, if it is no call."""
        return "" if self.started else self._markup.begin + self._text + rest

    def _start(self, name: str, arguments: str = "") -> CallDelta:
        number = f"call_{secrets.token_hex(12)}"
        self.started.append(number)
        return CallDelta(self.index + len(self.started) - 1, arguments, number, name)

    def _stream(self) -> tuple[list[CallDelta], str | None]:
        stop = self._scanner.end(self._text, self._sent)
        at = len(self._text) if stop is None else stop
        part, self._sent = self._text[self._sent : at], at
        parts = [CallDelta(self.index, part)] if part else []
        if stop is None:
            return parts, None
        closing = self._text.find("}", stop)
        if closing < 0:
            self._scanner.is_done = True
            return parts, None
        return parts, self._text[closing + 1 :]

    def _whole(self) -> tuple[list[CallDelta], str | None]:
        """Wait for a complete value, an object or a list of objects."""
        start = len(self._text) - len(self._text.lstrip())
        try:
            value, stop = DECODER.raw_decode(self._text, start)
        except ValueError:
            return [], None
        calls = [item for item in _listed(value) if self._is_call(item)]
        if not calls:
            return [], None
        markup = self._markup
        parts = [
            self._start(
                str(item[markup.name_key]),
                json.dumps(item[markup.arguments_key], ensure_ascii=False),
            )
            for item in calls
        ]
        return parts, self._text[stop:]

    def _is_call(self, item: Any) -> bool:
        keys = {self._markup.name_key, self._markup.arguments_key}
        return isinstance(item, dict) and keys <= set(item)


class _Nesting:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str, start: int) -> int | None:
        """Scan from ``start``; returns the place behind the object once it ends."""
        if self.is_done:
            return start
        for place in range(start, len(text)):
            letter = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
