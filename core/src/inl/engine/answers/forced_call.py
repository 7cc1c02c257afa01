"""Structures of answers that must be a tool call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inl.guidance.closed_schemas import close_objects
from inl.guidance.json_schemas import as_resource

if TYPE_CHECKING:
    from inl.engine.answers.conversation import Tool
    from inl.engine.answers.markup import CallMarkup

ANY_OBJECT = {"type": "object"}


def forced_call(
    tools: Sequence[Tool], choice: str, markup: CallMarkup
) -> dict[str, Any]:
    """Return the structure of one call of the tools of a choice.

    An object of the arguments has no properties but those that its schema names, unless
    the schema states ``additionalProperties``: functions rarely take others.
    """
    name = choice.removeprefix("tool:")
    chosen = [tool for tool in tools if choice == "required" or tool.name == name]
    calls = [
        {
            "type": "object",
            "properties": {
                markup.name_key: {"const": tool.name},
                markup.arguments_key: as_resource(
                    close_objects(tool.parameters or ANY_OBJECT), f"tool/{at}"
                ),
            },
            "required": [markup.name_key, markup.arguments_key],
            "additionalProperties": False,
        }
        for at, tool in enumerate(chosen)
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"json_schema": schema}
