"""Messages of a chat, truncated from the front to fit the context."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inl.bounded_json import read_json
from inl.errors import PromptTooLong, RequestError

Content = str | list[dict[str, Any]]
"""Text, or parts of text and images."""
Message = dict[str, Any]
ROLES = ("system", "user", "assistant")


class Conversation:
    """A system prompt and turns; a turn is a user message and its answer.

    All messages are stored, so that :meth:`save` writes the whole conversation; the
    model receives the turns from ``start`` on.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        """Without the system prompt, oldest first."""
        self.start = 0
        """Index of the first message that the model receives."""

    @property
    def turns(self) -> int:
        """Number of user messages."""
        return sum(message["role"] == "user" for message in self.messages)

    def ask(self, content: Content) -> None:
        """Append a user message."""
        self.messages.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        """Append an assistant message."""
        self.messages.append({"role": "assistant", "content": text})

    def pop_last(self, role: str) -> Message | None:
        """Remove and return the last message if it has this role."""
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages.pop()
        return None

    def clear(self) -> None:
        """Remove all turns; keep the system prompt."""
        self.messages.clear()
        self.start = 0

    def visible(self) -> list[Message]:
        """Return the messages that the model receives."""
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return begin + self.messages[self.start :]

    def fit(
        self, encode: Callable[[Sequence[Message]], list[int]], room: int
    ) -> tuple[list[int], int]:
        """Return the prompt's token ids and the number of oldest turns dropped.

        room: maximum prompt length in tokens. Raises :class:`PromptTooLong`, without
        dropping turns, if the last message alone is longer.
        """
        start, dropped = self.start, 0
        while True:
            try:
                ids = encode(self.visible())
                if len(ids) <= room:
                    return ids, dropped
                reason = f"message: found {len(ids)} tokens with the system prompt"
                reason += f", accepts {room}"
            except PromptTooLong as error:  # far too long: it was not encoded
                reason = str(error)
            following = self._turn_after(self.start)
            if following is None:
                self.start = start
                raise PromptTooLong(f"{reason}; make it shorter or raise --context")
            self.start = following
            dropped += 1

    def _turn_after(self, start: int) -> int | None:
        for place in range(start + 1, len(self.messages)):
            if self.messages[place]["role"] == "user":
                return place
        return None

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, with the paths of its images.

        Raises :class:`RequestError`.
        """
        begin = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps({"messages": begin + self.messages}, indent=1, default=str)
        try:
            path.write_text(text + "\n", "utf-8")
        except (OSError, ValueError) as error:
            raise RequestError(f"{path}: cannot be written: {error}") from error

    def load(self, path: Path) -> None:
        """Load a file written by :meth:`save`.

        Raises :class:`RequestError`, and changes nothing, for an invalid file.
        """
        messages = _messages(read_json(path, f"{path}: cannot be read"), path)
        first = messages[0]["role"] == "system" if messages else False
        self.system = messages.pop(0)["content"] if first else None
        self.messages, self.start = messages, 0


def _messages(data: Any, path: Path) -> list[Message]:
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list):
        raise RequestError(f"{path}: has no list 'messages'; accepted: a file of /save")
    for place, message in enumerate(messages):
        known = isinstance(message, dict) and message.get("role") in ROLES
        content = message.get("content") if isinstance(message, dict) else None
        is_user = known and message["role"] == "user"
        late = known and message["role"] == "system" and place > 0
        if (
            not known
            or late
            or not (isinstance(content, str) or (is_user and _is_parts(content)))
        ):
            raise RequestError(
                f"{path}: messages[{place}]: found {message!r:.60}, accepted: a role "
                f"({', '.join(ROLES)}, system at first only) and a text as content, "
                "with paths of images from a user"
            )
    return [
        {"role": each["role"], "content": _content(each["content"])}
        for each in messages
    ]


def _is_parts(content: Any) -> bool:
    """Whether a content is a list of texts and paths of images."""
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") in ("text", "image")
        and isinstance(part.get(part["type"]), str)
        for part in content
    )


def _content(content: Any) -> Content:
    if isinstance(content, str):
        return content
    return [
        {"type": "image", "image": Path(part["image"])}
        if part["type"] == "image"
        else {"type": "text", "text": part["text"]}
        for part in content
    ]
