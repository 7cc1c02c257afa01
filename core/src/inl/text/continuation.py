"""Continuation of a conversation's last message: cut the rendering at its end.

A random tag is appended to the message before rendering. The prompt is the rendered
text before the tag, without what the template writes after the message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from inl.errors import RequestError

REASONING: tuple[str, ...] = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with an answer's reasoning, in templates of different models."""


class Continuation:
    """A conversation whose last message ends with a tag.

    field: field of the last message to continue, a text or a list of parts of which the
    last one with "text" is continued. Raises :class:`~inl.errors.RequestError` if there
    is none.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], field: str) -> None:
        # Random, so that no message contains it; ASCII, which JSON does not escape.
        self._tag = f"CONTINUED-{os.urandom(12).hex()}"
        self._text = ""
        last = dict(messages[-1]) if messages else {}
        fields = [field]
        if field in REASONING:  # one text under several names: the template reads one
            fields = [each for each in REASONING if last.get(each) == last.get(field)]
        for each in fields:
            last[each] = self._tagged(last.get(each), each)
        self.messages = [*messages[:-1], last]

    def _tagged(self, value: Any, field: str) -> Any:
        # The space behind the tag shows whether the template trims the message.
        if isinstance(value, str):
            self._text = value
            return f"{value}{self._tag} "
        if isinstance(value, list | tuple):
            for index in reversed(range(len(value))):
                part = value[index]
                if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    self._text = part["text"]
                    tagged = {**part, "text": f"{part['text']}{self._tag} "}
                    return [*value[:index], tagged, *value[index + 1 :]]
        raise RequestError(
            f"continue_final_message: found {value!r:.80} as {field!r} of the last "
            "message; accepted: a text, or a list of parts with a text"
        )

    def cut(self, rendered: str) -> str:
        """Return the rendering up to the end of the message, trimmed if the template
        trims messages.

        Raises :class:`~inl.errors.RequestError` if the template does not render the
        whole message.
        """
        end = rendered.rfind(self._tag)
        if end < 0 or self._text.strip() not in rendered:
            raise RequestError(
                "continue_final_message: found a chat template that does not render "
                f"the whole last message, {self._text!r:.80}; accepted: another "
                "message, or False"
            )
        trimmed = rendered[end + len(self._tag) :][:1] != " "
        text = rendered[:end].replace(f"{self._tag} ", "").replace(self._tag, "")
        return text.rstrip() if trimmed else text


def with_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with their reasoning under the names that templates read."""
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    values = (message.get(name) for name in REASONING)
    reasoning = next((value for value in values if value is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
