# /// script
# dependencies = ["haystack-ai", "ollama-haystack"]
# ///
"""Haystack's generators for OpenAI and Ollama."""

from typing import Literal

from cases import MODEL, QUESTION, TOKENS, URL, check_city, run
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from haystack_integrations.components.embedders.ollama import OllamaTextEmbedder
from haystack_integrations.components.generators.ollama import OllamaChatGenerator
from pydantic import BaseModel

KEY = Secret.from_token("none")
ASKED = [ChatMessage.from_user(QUESTION)]


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"{city}: sunny"


def openai(**settings):
    options = {"temperature": 0, "max_tokens": TOKENS, **settings.pop("options", {})}
    return OpenAIChatGenerator(
        api_base_url=f"{URL}/v1", api_key=KEY, model=MODEL, generation_kwargs=options,
        **settings,
    )  # fmt: skip


def ollama(**settings):
    options = {"temperature": 0, "num_predict": TOKENS}
    return OllamaChatGenerator(
        url=URL, model=MODEL, generation_kwargs=options, **settings
    )


def plain():
    for each in (openai(), ollama()):
        (reply,) = each.run(ASKED)["replies"]
        assert "Paris" in reply.text, each


def stream():
    for make in (openai, ollama):
        parts = []
        (reply,) = make(streaming_callback=parts.append).run(ASKED)["replies"]
        assert "".join(part.content for part in parts) == reply.text
        assert len(parts) > 1


def tools():
    tool = create_tool_from_function(weather)
    options = {"tool_choice": "required", "max_tokens": 60}
    (reply,) = openai(options=options, tools=[tool]).run(ASKED)["replies"]
    check_city(reply.tool_call.arguments)
    result = ChatMessage.from_tool("sunny", origin=reply.tool_call)
    openai(tools=[tool]).run([*ASKED, reply, result])
    ollama(tools=[tool]).run([*ASKED, reply, result])


def structured():
    options = {"response_format": Color, "max_tokens": 60}
    (reply,) = openai(options=options).run(ASKED)["replies"]
    assert Color.model_validate_json(reply.text)
    schema = Color.model_json_schema()
    (reply,) = ollama(response_format=schema).run(ASKED)["replies"]
    assert Color.model_validate_json(reply.text)


def embeddings():
    one = OpenAITextEmbedder(api_base_url=f"{URL}/v1", api_key=KEY, model=MODEL)
    two = OllamaTextEmbedder(url=URL, model=MODEL)
    assert len(one.run("a")["embedding"]) == len(two.run("a")["embedding"]) > 100


run(plain, stream, tools, structured, embeddings)
