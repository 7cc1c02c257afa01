"""Arguments of the chat template on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inl.errors import RequestError


def chat_options(
    tools: Path | None, documents: Path | None, variables: Sequence[str] | None
) -> dict[str, Any]:
    """Return the arguments of ``chat_ids`` for the options of a command.

    tools, documents: files with a JSON list of objects. variables: ``NAME=VALUE`` each,
    a JSON value or else a text. Raises :class:`~inl.errors.RequestError`.
    """
    options: dict[str, Any] = dict(map(_variable, variables or ()))
    for name, path in (("tools", tools), ("documents", documents)):
        if path is not None:
            options[name] = _objects(name, path)
    return options


def _objects(name: str, path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"--{name}: {path}: cannot be read: {error}; accepted: a JSON file"
        ) from error
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
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
