# /// script
# dependencies = ["autogen-agentchat", "autogen-ext[openai,ollama]"]
# ///
"""AutoGen's clients for OpenAI and Ollama, and an agent on them."""

import asyncio
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.ollama import OllamaChatCompletionClient
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cases import MODEL, QUESTION, TOKENS, URL, check_city, run
from pydantic import BaseModel

ASKED = [UserMessage(content=QUESTION, source="user")]
INFO = {
    "vision": False, "function_calling": True, "json_output": True,
    "structured_output": True, "family": "unknown", "multiple_system_messages": True,
}  # fmt: skip


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


async def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"{city}: sunny"


TOOL = FunctionTool(weather, "Weather of a city.", strict=True)


def openai(tokens=TOKENS):
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", model_info=INFO,
        temperature=0, max_tokens=tokens,
    )  # fmt: skip


def ollama():
    return OllamaChatCompletionClient(
        model=MODEL, host=URL, model_info=INFO,
        options={"temperature": 0, "num_predict": TOKENS},
    )  # fmt: skip


def plain():
    async def ask(client):
        return await client.create(ASKED)

    for client in (openai(), ollama()):
        found = asyncio.run(ask(client))
        assert "Paris" in found.content
        assert found.usage.completion_tokens > 0


def stream():
    async def read(client):
        return [part async for part in client.create_stream(ASKED)]

    for client in (openai(), ollama()):
        *parts, last = asyncio.run(read(client))
        assert "".join(parts) == last.content


def tools():
    async def ask():
        return await openai(60).create(ASKED, tools=[TOOL], tool_choice=TOOL)

    async def agent():
        found = AssistantAgent("test", openai(), tools=[TOOL])
        return await found.on_messages([], CancellationToken())

    (call,) = asyncio.run(ask()).content
    check_city(call.arguments)
    assert asyncio.run(agent())


def structured():
    async def ask(client):
        return await client.create(ASKED, json_output=Color)

    for client in (openai(60), ollama()):
        assert Color.model_validate_json(asyncio.run(ask(client)).content)


run(plain, stream, tools, structured)
