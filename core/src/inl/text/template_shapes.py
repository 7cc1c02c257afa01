"""Which forms of messages a chat template takes, found by rendering probes.

A template may raise for a form, or lose its text in silence: only some templates have
a system role, repeat a role, loop over the parts of a message or read the arguments of
calls as text. :class:`TemplateShapes` renders conversations of words that no template
contains, each when a request first needs its result, and :meth:`TemplateShapes.fit`
writes messages in the form that shows their texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

from inl.bounded_json import parse_json
from inl.errors import InvalidJson, RequestError, TemplateError

Message = Mapping[str, Any]

NAME, KEY, VALUE = "inlname", "inlkey", "inlvalue"
WORDS = ("inlfirst", "inlsecond", "inlthird", "inlfourth", "inlfifth", "inlsixth")
"""Contents of probe messages, in this order."""

LONG_ID, SHORT_ID = "call_0123456789abcdef01234567", "a1B2c3D4e"
SHORT = 9
"""Letters of a call's id in the templates of Mistral's models, which take no other."""

ROLES = ("tool", "ipython", "function")
"""Roles of a tool's result."""


class CallShape(NamedTuple):
    """How a template takes tool calls and their results."""

    has_short_ids: bool = False
    has_text_arguments: bool = False
    """Whether arguments are JSON text, not an object."""
    content: str | None = ""
    """Content of a message that has calls only."""
    role: str = "tool"
    has_result_parts: bool = False
    """Whether the content of a result is a list of parts."""


class TemplateShapes:
    """The forms that one template takes; each is probed once. Thread-safe.

    render: renders messages; raises :class:`~inl.errors.TemplateError` for those that
    the template refuses.
    """

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._contents: dict[tuple[str, bool], bool | None] = {}

    def fit(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages in the forms that the template takes.

        Raises :class:`~inl.errors.RequestError` where none shows their texts.
        """
        fitted = [_as_system(message) for message in messages]
        if any(_has_calls(each) or each.get("role") in ROLES for each in fitted):
            shape = self.calls
            if shape is None and self.takes_calls_as_text:
                fitted = list(calls_as_text(fitted))
            elif shape is not None:
                fitted = [_with_calls(message, shape) for message in fitted]
        fitted = self._fit_system(fitted)
        if _repeats(fitted) and not self.takes_repeated_roles:
            fitted = _merged(fitted)
        return [self._with_content(message) for message in fitted]

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message may begin a conversation."""
        return self._shows(self._probe("system", "user"))

    @cached_property
    def takes_any_system(self) -> bool:
        """Whether there may be several system messages, at any place."""
        roles = ("system", "system", "user", "assistant", "system", "user")
        return self._shows(self._probe(*roles))

    @cached_property
    def takes_repeated_roles(self) -> bool:
        """Whether messages of one role may follow each other."""
        roles = ("user", "user", "assistant", "assistant", "user")
        return self._shows(self._probe(*roles))

    @cached_property
    def calls(self) -> CallShape | None:
        """How calls are shown with their arguments and results; ``None``: not."""
        shown: CallShape | None = None
        for shape in _call_shapes():
            text = self._try(self._called(shape))
            if text is None or any(each not in text for each in (NAME, KEY, VALUE)):
                continue
            if WORDS[1].lower() not in text.lower():
                continue
            # Not as Python writes it, nor as JSON within JSON.
            if f"'{KEY}'" not in text and f'\\"{KEY}' not in text:
                return shape
            shown = shown or shape
        return shown

    @cached_property
    def takes_calls_as_text(self) -> bool:
        """Whether calls and results are shown as text of messages."""
        said = map(self._with_user_form, calls_as_text(self._called(CallShape())))
        text = self._try(list(said))
        return text is not None and NAME in text

    def takes_text(self, role: str) -> bool:
        """Whether the content of a role may be a string."""
        return bool(self._takes(role, parts=False))

    def takes_parts(self, role: str) -> bool:
        """Whether the content of a role may be a list of parts."""
        return bool(self._takes(role, parts=True))

    def _takes(self, role: str, *, parts: bool) -> bool | None:
        """Whether a content is shown; ``None`` if the template refuses the probe."""
        key = (role, parts)
        if key not in self._contents:
            self._contents[key] = self._find_content(role, parts)
        return self._contents[key]

    def _find_content(self, role: str, parts: bool) -> bool | None:
        content: Any = _in_parts(WORDS[0]) if parts else WORDS[0]
        message = {"role": role, "content": content}
        before: list[Message] = []
        if role != "user" and self.takes_text("user"):
            before = [{"role": "user", "content": "a"}]
        elif role != "user":
            before = [{"role": "user", "content": _in_parts("a")}]
        said = [message, *before] if role == "system" else [*before, message]
        text = self._try(said)
        if text is None:
            return None
        if WORDS[0] not in text.lower():
            return False
        # A template of strings prints the list itself.
        return not parts or not any(f"{q}type{q}" in text for q in "'\"")

    def _fit_system(self, messages: list[Message]) -> list[Message]:
        at = [i for i, each in enumerate(messages) if each.get("role") == "system"]
        if not at or (at == [0] and self.takes_system):
            return messages
        if at != [0] and self.takes_any_system:
            return messages
        system = messages[at[0]]
        for place in at[1:]:
            system = _joined(system, messages[place])
        others = [each for each in messages if each.get("role") != "system"]
        if self.takes_system:
            return [system, *others]
        asked = {"role": "user", "content": system.get("content")}
        if others and others[0].get("role") == "user":
            return [{**others[0], **_joined(asked, others[0])}, *others[1:]]
        return [asked, *others]

    def _with_content(self, message: Message) -> Message:
        role, content = message.get("role"), message.get("content")
        if role not in ("system", "user", "assistant") or not content:
            return message
        is_text = isinstance(content, str)
        texts = [content] if is_text else _texts(content)
        if texts is None or self._takes(role, parts=not is_text):
            return message
        if self._takes(role, parts=is_text):
            joined = "\n".join(texts)
            return {**message, "content": _in_parts(joined) if is_text else joined}
        if self._takes(role, parts=not is_text) is None:
            return message  # the template says what it refuses
        raise RequestError(
            f"messages: found one of role {role!r}, whose text the chat template does "
            "not show; accepted: roles that it shows"
        )

    def _probe(self, *roles: str) -> list[Message]:
        said = zip(roles, WORDS, strict=False)
        messages = [{"role": role, "content": word} for role, word in said]
        return [self._with_user_form(each) for each in messages]

    def _with_user_form(self, message: Message) -> Message:
        """Return a probe message with a content like that of a user's message."""
        is_text = isinstance(message["content"], str)
        if not is_text or self.takes_text("user") or not self.takes_parts("user"):
            return message
        return {**message, "content": _in_parts(message["content"])}

    def _called(self, shape: CallShape) -> list[Message]:
        arguments: Any = {KEY: VALUE}
        if shape.has_text_arguments:
            arguments = json.dumps(arguments)
        number = SHORT_ID if shape.has_short_ids else LONG_ID
        function = {"name": NAME, "arguments": arguments}
        call = {"id": number, "type": "function", "function": function}
        result = {"tool_call_id": number, "name": NAME, "role": shape.role}
        content = _in_parts(WORDS[1]) if shape.has_result_parts else WORDS[1]
        return [
            *self._probe("user"),
            {"role": "assistant", "content": shape.content, "tool_calls": [call]},
            {**result, "content": content},
        ]

    def _shows(self, messages: Sequence[Message]) -> bool:
        text = self._try(messages)
        return text is not None and all(
            word in text.lower() for word in WORDS[: len(messages)]
        )

    def _try(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages, add_generation_prompt=False)
        except TemplateError:
            return None


def calls_as_text(messages: Iterable[Message]) -> Iterable[dict[str, Any]]:
    """Yield messages with their calls and results as text, for any template."""
    for message in messages:
        content = message.get("content") or ""
        texts = _texts(content)
        content = content if texts is None else "\n".join(texts)
        if message.get("role") in ROLES:
            yield {"role": "user", "content": _as_result(content)}
        elif _has_calls(message):
            calls = map(_call_text, filter(_is_call, message["tool_calls"]))
            text = "\n".join([*([content] if content else ()), *calls])
            kept = {k: v for k, v in message.items() if k != "tool_calls"}
            yield {**kept, "content": text}
        else:
            yield dict(message)


def _as_result(content: Any) -> Any:
    """Return the result of a call between tags; parts, such as images, stay parts."""
    begin, end = "<tool_response>\n", "\n</tool_response>"
    if not isinstance(content, list | tuple):
        return f"{begin}{content}{end}"
    tags = ({"type": "text", "text": text} for text in (begin, end))
    return [next(tags), *content, next(tags)]


def _call_text(call: Any) -> str:
    function = call["function"]
    arguments = _object(function.get("arguments"))
    value = {"name": function.get("name"), "arguments": arguments}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


def _call_shapes() -> Iterable[CallShape]:
    choices = product((False, True), ROLES, ("", None), (False, True), (False, True))
    for parts, role, content, is_text, is_short in choices:
        yield CallShape(is_short, is_text, content, role, parts)


def _as_system(message: Message) -> Message:
    is_developer = message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message


def _has_calls(message: Message) -> bool:
    """Whether a message has calls in the form of ``transformers``."""
    calls = message.get("tool_calls")
    return isinstance(calls, list | tuple) and any(map(_is_call, calls))


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _with_calls(message: Message, shape: CallShape) -> Message:
    fitted = dict(message)
    if fitted.get("role") in ROLES:
        fitted["role"] = shape.role
        if shape.has_result_parts and isinstance(fitted.get("content"), str):
            fitted["content"] = _in_parts(fitted["content"])
    if shape.has_short_ids and isinstance(fitted.get("tool_call_id"), str):
        fitted["tool_call_id"] = _short_id(fitted["tool_call_id"])
    if _has_calls(message):
        calls = message["tool_calls"]
        fitted["tool_calls"] = [_with_shape(call, shape) for call in calls]
        fitted["content"] = message.get("content") or shape.content
    return fitted


def _with_shape(call: Any, shape: CallShape) -> Any:
    if not _is_call(call):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if shape.has_text_arguments and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not shape.has_text_arguments:
        function["arguments"] = _object(arguments)
    fitted = {**call, "function": function}
    if shape.has_short_ids:
        fitted["id"] = _short_id(str(call.get("id", "")))
    return fitted


def _object(arguments: Any) -> Any:
    """Return the object that arguments as JSON text are; others as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = parse_json(arguments or "{}", "arguments")
    except InvalidJson:
        return arguments
    return value if isinstance(value, dict) else arguments


def _short_id(number: str) -> str:
    """Return an id of nine letters, the same one for the same id."""
    if len(number) == SHORT and number.isascii() and number.isalnum():
        return number
    return hashlib.sha256(number.encode(errors="replace")).hexdigest()[:SHORT]


def _repeats(messages: Sequence[Message]) -> bool:
    return any(_can_join(left, right) for left, right in pairwise(messages))


def _can_join(left: Message, right: Message) -> bool:
    role = left.get("role")
    plain = {"role", "content"}
    return (
        role in ("user", "assistant")
        and role == right.get("role")
        and plain >= left.keys() | right.keys()
    )


def _merged(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and _can_join(merged[-1], message):
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _joined(left: Message, right: Message) -> Message:
    """Return the first message with the content of both."""
    one, other = left.get("content") or "", right.get("content") or ""
    if isinstance(one, str) and isinstance(other, str):
        content: Any = "\n\n".join(each for each in (one, other) if each)
    else:
        content = [*_listed(one), *_listed(other)]
    return {**left, "content": content}


def _listed(content: Any) -> list[Any]:
    return _in_parts(content) if isinstance(content, str) else list(content)


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _texts(content: Any) -> list[str] | None:
    """Return the texts of a list of parts; ``None`` if it has other parts."""
    if not isinstance(content, list | tuple):
        return None
    texts = [each.get("text") for each in content if isinstance(each, Mapping)]
    if len(texts) < len(content) or not all(isinstance(each, str) for each in texts):
        return None
    return [str(each) for each in texts]
