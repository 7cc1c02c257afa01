# /// script
# dependencies = ["pydantic-ai-slim[openai,anthropic]"]
# ///
"""Pydantic AI by its models for OpenAI (chat and responses), Anthropic and Ollama."""

import asyncio
from typing import Literal

from cases import MODEL, QUESTION, TOKENS, URL, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
CHAT = OpenAIChatModel(MODEL, provider=openai)
RESPONSES = OpenAIResponsesModel(MODEL, provider=openai)
OLLAMA = OpenAIChatModel(
    MODEL, provider=OllamaProvider(base_url=f"{URL}/v1", api_key="none")
)
ANTHROPIC = AnthropicModel(
    MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")
)
MODELS = (CHAT, RESPONSES, OLLAMA, ANTHROPIC)
SETTINGS = {"temperature": 0, "max_tokens": TOKENS}
LONGER = {"temperature": 0, "max_tokens": 100}


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


def plain():
    for each in MODELS:
        found = Agent(each, instructions="Be brief.").run_sync(
            QUESTION, model_settings=SETTINGS
        )
        assert found.output, each
        assert found.usage().output_tokens <= TOKENS


def stream():
    async def read(each):
        agent = Agent(each)
        async with agent.run_stream(QUESTION, model_settings=SETTINGS) as parts:
            return "".join([part async for part in parts.stream_text(delta=True)])

    for each in MODELS:
        assert asyncio.run(read(each)), each


def tools():
    for each in MODELS:
        found = Agent(each, output_type=ToolOutput(Color)).run_sync(
            "A color?", model_settings=LONGER
        )
        assert isinstance(found.output, Color), each


def structured():
    for each in (CHAT, RESPONSES):
        found = Agent(each, output_type=NativeOutput(Color)).run_sync(
            "A color?", model_settings=LONGER
        )
        assert isinstance(found.output, Color), each


run(plain, stream, tools, structured)
