"""Tools for models whose chat template does not show any: as text of the messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inl.engine.answers.conversation import Conversation, Tool
from inl.text.template_shapes import calls_as_text

INSTRUCTIONS = """You can call these functions, given as JSON schemas:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object between tags and nothing else:
<tool_call>
{{"name": "FUNCTION NAME", "arguments": {{ARGUMENTS}}}}
</tool_call>"""


def with_tools(
    conversation: Conversation, tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """Return messages that describe the tools, their calls and results as text."""
    messages = list(calls_as_text(conversation.messages))
    lines = [json.dumps(tool.as_template_value()["function"]) for tool in tools]
    text = INSTRUCTIONS.format(tools="\n".join(lines)) if tools else ""
    if not text:
        return messages
    if messages and messages[0]["role"] == "system":
        content = f"{messages[0]['content']}\n\n{text}"
        return [{"role": "system", "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
