# /// script
# dependencies = ["semantic-kernel[ollama]"]
# ///
"""Semantic Kernel's connectors for OpenAI and Ollama."""

import asyncio
from typing import Annotated, Literal

from cases import MODEL, QUESTION, TOKENS, URL, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.ollama import (
    OllamaChatCompletion,
    OllamaChatPromptExecutionSettings,
)
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import kernel_function


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


class Weather:
    @kernel_function(name="weather", description="Weather of a city.")
    def weather(self, city: Annotated[str, "name of the city"]) -> str:
        return f"{city}: sunny"


def history():
    found = ChatHistory()
    found.add_user_message(QUESTION)
    return found


def openai():
    return OpenAIChatCompletion(
        MODEL, async_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    )


def settings(**options):
    return OpenAIChatPromptExecutionSettings(
        **{"temperature": 0, "max_tokens": TOKENS} | options
    )


def ollama():
    options = {"temperature": 0, "num_predict": TOKENS}
    return OllamaChatCompletion(
        ai_model_id=MODEL, host=URL
    ), OllamaChatPromptExecutionSettings(options=options)


def plain():
    async def ask():
        first = await openai().get_chat_message_content(history(), settings())
        service, options = ollama()
        return first, await service.get_chat_message_content(history(), options)

    for answer in asyncio.run(ask()):
        assert "Paris" in str(answer)


def stream():
    async def read(service, options):
        parts = service.get_streaming_chat_message_content(history(), options)
        return "".join([str(part) async for part in parts])

    assert "Paris" in asyncio.run(read(openai(), settings()))
    assert "Paris" in asyncio.run(read(*ollama()))


def tools():
    async def ask():
        kernel = Kernel()
        kernel.add_plugin(Weather(), "sky")
        choice = FunctionChoiceBehavior.Required(auto_invoke=False)
        options = settings(max_tokens=60, function_choice_behavior=choice)
        return await openai().get_chat_message_content(
            history(), options, kernel=kernel
        )

    (call,) = [
        item
        for item in asyncio.run(ask()).items
        if isinstance(item, FunctionCallContent)
    ]
    assert call.name == "sky-weather"
    assert set(call.parse_arguments()) == {"city"}


def structured():
    async def ask():
        options = settings(max_tokens=60, response_format=Color)
        return await openai().get_chat_message_content(history(), options)

    assert Color.model_validate_json(str(asyncio.run(ask())))


def embeddings():
    async def ask():
        client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
        service = OpenAITextEmbedding(MODEL, async_client=client)
        return await service.generate_embeddings(["a", "b"])

    assert len(asyncio.run(ask())) == 2


run(plain, stream, tools, structured, embeddings)
