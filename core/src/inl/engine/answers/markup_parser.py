"""Splits text with a model's markup into content, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from inl.engine.answers.call_text import CallText
from inl.engine.answers.conversation import Delta
from inl.engine.output_text import without

if TYPE_CHECKING:
    from inl.engine.answers.markup import CallMarkup, ReasoningMarkup
    from inl.engine.output_text import Span

BETWEEN: Final = re.compile(r"[\s,;\]}]*")
"""What may stand between two calls of one mark, and behind the last one."""


class MarkupParser:
    """Parses the text of one completion as it arrives.

    Marks may be special tokens, whose text is no content. Text that may be the
    beginning of a mark is held back. calls, reasoning: ``None`` if there are none.
    is_reasoning: whether the prompt has begun the reasoning. is_forced: whether the
    text, behind the reasoning, is one call without marks. tools: names of the functions
    that may be called; without marks, only they are called without arguments.
    only_tools: whether a call of another function is content. one_call: whether the
    text ends with the first call.
    """

    sees_special = True

    def __init__(
        self,
        calls: CallMarkup | None,
        reasoning: ReasoningMarkup | None,
        *,
        is_reasoning: bool = False,
        is_forced: bool = False,
        tools: Collection[str] = (),
        only_tools: bool = False,
        one_call: bool = False,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._tools, self._only_tools = frozenset(tools), only_tools
        self._one_call = one_call
        self._state = "reasoning" if is_reasoning else "content"
        self.reasoning_end: int | None = None if is_reasoning else 0
        """Characters up to the end of the reasoning; ``None`` while it lasts."""
        self._held = ""
        self._special: list[Span] = []
        """Places of special tokens in the held text."""
        self._fed = 0
        self._count = 0
        self._call: CallText | None = None
        self._mark = ""
        """Text of the last mark, empty if it was a special token."""
        self._skipped: str | None = ""
        """Mark that is dropped if it comes next, and white space around it."""
        self._is_between = False
        """Whether a call has ended, and another one may follow before the mark."""
        self._is_start = True
        """Whether nothing but white space was content so far."""
        self.end: int | None = None
        """Characters up to the end of the only call, behind which nothing is read."""
        self._is_forced = is_forced
        if is_forced and calls is not None and not is_reasoning:
            self._begin_call(calls)

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was found."""
        return self._count > 0

    def feed(self, text: str, special: Sequence[Span] = ()) -> Delta:
        """Return the parts of the next text that are certain.

        special: places of special tokens in the text.
        """
        delta = Delta()
        if self.end is not None:
            return delta
        start = len(self._held)
        self._special += [(a + start, b + start) for a, b in special]
        self._held += text
        self._fed += len(text)
        while self._held and self.end is None and self._advance(delta):
            """Each round ends at a mark."""
        return delta

    def finish(self) -> Delta:
        """Return the rest: no more text will follow."""
        delta = Delta()
        if self.end is not None or (self._skipped is not None and self._call is None):
            return delta  # white space, or a mark that was cut off
        if self._state == "reasoning":
            delta.reasoning = self._remove(len(self._held))
        elif self._call is not None:
            delta.content = self._unparsed(self._call) + self._remove(len(self._held))
        else:
            delta.content = self._remove(len(self._held))
        return delta

    def _advance(self, delta: Delta) -> bool:
        """Parse up to the next mark; returns whether there was one."""
        if self._is_between and not self._pass_between():
            return False
        if self._skipped is not None and not self._skip(self._skipped):
            return False
        if self._state == "reasoning":
            return self._advance_reasoning(delta)
        if self._call is not None:
            return self._advance_call(delta, self._call)
        return self._advance_content(delta)

    def _remove(self, length: int) -> str:
        """Remove held text; returns it without special tokens."""
        text, self._held = self._held[:length], self._held[length:]
        if not self._special:
            return text
        inside = [(a, min(b, length)) for a, b in self._special if a < length]
        self._special = [
            (max(a - length, 0), b - length) for a, b in self._special if b > length
        ]
        return without(text, inside)

    def _pass_between(self) -> bool:
        """Drop what follows a call; returns whether anything comes next."""
        assert self._calls is not None, "there was a call"
        match = BETWEEN.match(self._held)
        assert match is not None, "it matches nothing too"
        if match.end() == len(self._held):
            return False
        if self._is_other_special(match.end()):
            self._remove(self._special[0][1])
            return bool(self._held) and self._pass_between()
        if self._held.startswith("{", match.end()):
            self._remove(match.end())
            self._begin_call(self._calls)
        elif self._calls.begin:
            self._remove(match.end())
        self._is_between = False
        return True

    def _is_other_special(self, at: int) -> bool:
        """Whether a special token that is no mark of calls begins at a place."""
        assert self._calls is not None, "there was a call"
        if not self._special or self._special[0][0] != at:
            return False
        marks = [mark for mark in (self._calls.begin, self._calls.end) if mark]
        return not any(self._held.startswith(mark, at) for mark in marks)

    def _skip(self, mark: str) -> bool:
        """Drop white space and a mark; returns whether more text follows."""
        text = self._held.lstrip()
        if mark.startswith(text) and text != mark:
            return False
        text = text.removeprefix(mark).lstrip()
        self._remove(len(self._held) - len(text))
        self._skipped = None if text else ""
        return bool(text)

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
        text, found = self._take_until(tuple(marks), strip=True)
        self._is_start = self._is_start and not text
        delta.content += text
        if reasoning is not None and found == reasoning.begin:
            self._state, self._skipped = "reasoning", ""
            self.reasoning_end = None
        elif found and calls is not None:
            self._begin_call(calls, self._mark)
        return bool(found)

    def _begin_call(self, calls: CallMarkup, mark: str = "") -> None:
        """Read a call; ``mark``: the text in front of it, content if it is none."""
        self._mark = mark
        self._call = CallText(
            calls,
            self._count,
            accepted=self._tools if self._only_tools else None,
            # Without marks, an object with a name may be any answer.
            may_lack_arguments=None if calls.begin else self._tools,
        )
        self._skipped, self._is_between = None, False

    def _advance_call(self, delta: Delta, call: CallText) -> bool:
        """Parse a call up to the next special token, which is no part of it."""
        stop = self._special[0][0] if self._special else len(self._held)
        if not stop:
            mark = self._calls.end if self._calls is not None else ""
            if mark and self._held.startswith(mark):
                return self._leave_call(delta, call)
            self._remove(self._special[0][1])
            return True
        delta.calls = [*delta.calls, *call.feed(self._held[:stop])]
        self._count = max(self._count, call.index + call.is_started)
        if call.rest is None:
            self._remove(stop)
            return True
        self._remove(stop - call.rest)
        return self._leave_call(delta, call)

    def _leave_call(self, delta: Delta, call: CallText) -> bool:
        """Go on behind a call, or behind what is none, which is content."""
        self._call = None
        if not call.is_started:
            delta.content += self._unparsed(call)
            self._is_start = False
            return True
        assert self._calls is not None, "there was a call"
        if self._one_call:
            self.end = self._fed - len(self._held)
        self._skipped, self._is_between = self._calls.end, True
        return True

    def _unparsed(self, call: CallText) -> str:
        """Return the text of a call that was none."""
        return "" if call.is_started else self._mark + call.text

    def _take_until(
        self, marks: tuple[str, ...], *, strip: bool = False
    ) -> tuple[str, str]:
        """Remove text before the first mark, and the mark; returns both.

        strip: whether white space in front of the mark is dropped, however it arrives.
        """
        places = [(self._held.find(mark), mark) for mark in marks]
        found = min((each for each in places if each[0] >= 0), default=None)
        if found is not None:
            place, mark = found
            text = self._remove(place)
            self._mark = self._remove(len(mark))
            return text.rstrip() if strip else text, mark
        held = max((_overlap(self._held, mark) for mark in marks), default=0)
        stop = len(self._held) - held
        if marks and strip:
            stop = len(self._held[:stop].rstrip())
        return self._remove(stop), ""


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
