"""Reads one tool call, a JSON object, as its text arrives."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, NoReturn

from inl.bounded_json import check_json, parse_json
from inl.engine.answers.conversation import CallDelta
from inl.errors import InvalidJson

if TYPE_CHECKING:
    from inl.engine.answers.markup import CallMarkup

ARGUMENT_KEYS: Final = ("arguments", "parameters")
"""Keys of the arguments in other models' calls, read where this one's is absent."""

PLAIN_KEYS: Final = frozenset({"id", "type"})
"""Members that a call without arguments may have besides its name."""

LONGEST_HEAD: Final = 1024
"""Characters in which the arguments begin, or they are not passed on in parts."""

IN_STRING: Final = re.compile(r'["\\]')
BETWEEN_STRINGS: Final = re.compile(r'["{}\[\]]|[^\s,:\w+.\-]')
"""Marks of a JSON value, or a letter that no JSON has there."""


class CallText:
    """The text of a call from the mark in front of it to the end of its object.

    The arguments are passed on as they arrive where the name precedes them. A list
    may begin in front of the object.

    index: number of the call in the answer. accepted: names of functions that may be
    called, ``None`` for any. may_lack_arguments: names of those that may be called
    without arguments, ``None`` for any.
    """

    def __init__(
        self,
        markup: CallMarkup,
        index: int,
        *,
        accepted: Collection[str] | None = None,
        may_lack_arguments: Collection[str] | None = None,
    ) -> None:
        self.index = index
        self.is_started = False
        """Whether it is a call."""
        self.text = ""
        """What was read of it, until it is known to be a call."""
        self.rest: int | None = None
        """Last characters that are not part of it, once it has ended."""
        self._markup = markup
        self._accepted = accepted
        self._may_lack_arguments = may_lack_arguments
        name, arguments = re.escape(markup.name_key), re.escape(markup.arguments_key)
        self._head = re.compile(
            rf'\{{\s*"{name}"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{arguments}"\s*:\s*'
            r"(?=\{)"
        )
        self._begin: int | None = None
        """Place of the object in the text."""
        self._object = _Nesting()
        self._arguments = _Nesting()

    def feed(self, text: str) -> list[CallDelta]:
        """Return the parts of the call that are certain."""
        if self.is_started:
            return self._stream(text)
        seen = len(self.text)
        self.text += text
        if self._begin is None:
            self._begin = self._find_object()
            if self._begin is None:
                return []
            seen = self._begin
        head = None
        if seen - self._begin < LONGEST_HEAD:
            head = self._head.match(self.text, self._begin)
        if head is not None and self._accepts(name := _string(head[1])):
            start = self._start(name)
            self._object = _Nesting(1)
            return [start, *self._stream(self.text[head.end() :])]
        stop = self._object.end(self.text, seen)
        return [] if stop is None else self._whole(self.text[self._begin : stop], stop)

    def _find_object(self) -> int | None:
        """Return the place of the object; the call ends if there is none."""
        text = self.text.lstrip()
        if text.startswith("["):
            text = text[1:].lstrip()
        place = len(self.text) - len(text)
        if text and not text.startswith("{"):
            self._end(place)
        return place if text.startswith("{") else None

    def _accepts(self, name: str) -> bool:
        return bool(name) and (self._accepted is None or name in self._accepted)

    def _start(self, name: str, arguments: str = "") -> CallDelta:
        self.is_started = True
        return CallDelta(self.index, arguments, f"call_{secrets.token_hex(12)}", name)

    def _end(self, stop: int) -> None:
        """End at a place of the text."""
        self.rest = len(self.text) - stop
        self.text = self.text[:stop]

    def _stream(self, text: str) -> list[CallDelta]:
        """Pass the arguments on, and wait for the end of the object behind them."""
        parts = []
        at = 0
        if not self._arguments.is_done:
            stop = self._arguments.end(text, 0)
            at = len(text) if stop is None else stop
            parts = [CallDelta(self.index, text[:at])] if at else []
        if self._arguments.is_done:
            stop = self._object.end(text, at)
            self.rest = None if stop is None else len(text) - stop
        return parts

    def _whole(self, text: str, stop: int) -> list[CallDelta]:
        """Return the call of a complete object, if it is one."""
        self._end(stop)
        try:
            members = _members(text)
        except ValueError:
            return []
        name = _string(members.get(self._markup.name_key, ""))
        arguments = self._arguments_of(name, members)
        if arguments is None or not self._accepts(name):
            return []
        return [self._start(name, arguments)]

    def _arguments_of(self, name: str, members: Mapping[str, str]) -> str | None:
        """Return the arguments as JSON; ``None`` if the object is no call."""
        for key in (self._markup.arguments_key, *ARGUMENT_KEYS):
            if key in members:
                return _object_text(members[key]) or members[key]
        allowed = self._may_lack_arguments
        others = members.keys() - {self._markup.name_key} - PLAIN_KEYS
        return "{}" if not others and (allowed is None or name in allowed) else None


def _members(text: str) -> dict[str, str]:
    """Return the members of an object as they are written; raises ValueError."""
    try:
        check_json(text.encode("utf-8", "replace"), "call")
        return _split_members(text)
    except (InvalidJson, RecursionError) as error:
        raise ValueError(str(error)) from error


def _split_members(text: str) -> dict[str, str]:
    members: dict[str, str] = {}
    at = _behind(text, 0, "{")
    separator = "}" if text.startswith("}", at) else ","
    while separator == ",":
        key, stop = DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"found {key!r:.60}, accepts a string")
        start = _behind(text, stop, ":")
        _, stop = DECODER.raw_decode(text, start)
        members[key] = text[start:stop]
        at = _behind(text, stop, "")
        separator = text[at : at + 1]
        at = _behind(text, at, "," if separator == "," else "}")
    if separator == "}" and not members:
        at = _behind(text, at, "}")
    if at < len(text):
        raise ValueError(f"found {text[at:]!r:.60} behind the object")
    return members


def _behind(text: str, at: int, mark: str) -> int:
    """Return the place behind a mark and the white space around it."""
    found = re.compile(rf"[ \t\n\r]*{re.escape(mark)}[ \t\n\r]*").match(text, at)
    if found is None:
        raise ValueError(f"found {text[at:]!r:.20}, accepts {mark}")
    return found.end()


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"found {text}, which JSON has not")


DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _string(text: str) -> str:
    """Return the string of a JSON text, or "" if it is none."""
    try:
        found = parse_json(text, "arguments")
    except InvalidJson:
        return ""
    return found if isinstance(found, str) else ""


def _object_text(text: str) -> str | None:
    """Return the object of a JSON text, which may be encoded again as a string.

    No arguments, "" and null, are the empty object.
    """
    if text == "null":
        return "{}"
    if text.startswith('"'):
        inner = _string(text).strip()
        return _object_text(inner) if inner else "{}" if text == '""' else None
    try:
        _members(text)
    except ValueError:
        return None
    return text


class _Nesting:
    """Finds the end of a JSON object that arrives in parts; depth: how far inside."""

    def __init__(self, depth: int = 0) -> None:
        self.is_done = False
        self._depth = depth
        self._in_string = self._is_escaped = False

    def end(self, text: str, at: int) -> int | None:
        """Scan text; returns the place behind the object once it ends.

        It also ends in front of a letter that no JSON has there.
        """
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            pattern = IN_STRING if self._in_string else BETWEEN_STRINGS
            match = pattern.search(text, at)
            if match is None:
                return None
            letter, at = match[0], match.end()
            if self._in_string:
                self._in_string, self._is_escaped = letter != '"', letter == "\\"
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]" and self._depth > 1:
                self._depth -= 1
            else:
                self.is_done = True
                return at if letter in "}]" else at - 1
        return None
