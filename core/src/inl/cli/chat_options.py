"""Arguments of the chat template on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from inl.bounded_json import parse_json, read_json
from inl.errors import InvalidJson, RequestError


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a command whose prompt is a conversation."""

    trust_control_tokens: Annotated[
        bool,
        typer.Option(
            "--trust-control-tokens",
            help="Encode control tokens in messages as such, not as plain text.",
        ),
    ] = False
    tools: Annotated[
        Path | None,
        typer.Option(help="JSON file with schemas of functions for the chat template."),
    ] = None
    documents: Annotated[
        Path | None,
        typer.Option(help="JSON file with documents for the chat template."),
    ] = None
    chat_template_kwarg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Variable of the chat template, such as enable_thinking=false; "
            "can be repeated.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``chat_ids``.

        The value of a variable is JSON or else a text. Raises
        :class:`~inl.errors.RequestError`.
        """
        found: dict[str, Any] = dict(map(_variable, self.chat_template_kwarg or ()))
        for name, path in (("tools", self.tools), ("documents", self.documents)):
            if path is not None:
                found[name] = _objects(name, path)
        return {**found, "trust_control_tokens": self.trust_control_tokens}


def _objects(name: str, path: Path) -> list[dict[str, Any]]:
    value = read_json(path, f"--{name}: {path}: cannot be read as a JSON file")
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RequestError(
            f"--{name}: {path}: found {value!r:.80}; accepted: a JSON list of objects"
        )
    return value


RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt",
    "continue_final_message", "trust_control_tokens", "context",
)  # fmt: skip
"""Names that have options of their own."""


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or name in RESERVED:
        raise RequestError(
            f"--chat-template-kwarg: found {text!r:.80}; accepted: NAME=VALUE with the "
            f"name of a variable of the template, none of {', '.join(RESERVED)}"
        )
    try:
        return name, parse_json(value, name)
    except InvalidJson:
        return name, value
