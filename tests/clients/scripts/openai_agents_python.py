# /// script
# dependencies = ["openai-agents"]
# ///
"""OpenAI's Agents SDK, by chat completions and by responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import MODEL, QUESTION, TOKENS, URL, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
MODELS = (
    OpenAIChatCompletionsModel(MODEL, client),
    OpenAIResponsesModel(MODEL, client),
)
SETTINGS = ModelSettings(temperature=0, max_tokens=TOKENS)
LONGER = ModelSettings(temperature=0, max_tokens=100)
FORCED = ModelSettings(temperature=0, max_tokens=60, tool_choice="required")


class Color(BaseModel):
    name: Literal["red", "green", "blue"]
    is_warm: bool


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"{city}: sunny"


def agent(each, settings=SETTINGS, **options):
    return Agent("test", model=each, model_settings=settings, **options)


def plain():
    for each in MODELS:
        found = Runner.run_sync(agent(each, instructions="Be brief."), QUESTION)
        assert found.final_output, each


def stream():
    async def read(each):
        found = Runner.run_streamed(agent(each), QUESTION)
        kinds = [event.type async for event in found.stream_events()]
        return found.final_output, kinds

    for each in MODELS:
        # Not asyncio.run: the client belongs to the loop of the calls before.
        text, kinds = asyncio.get_event_loop().run_until_complete(read(each))
        assert "Paris" in text, each
        assert "raw_response_event" in kinds


def tools():
    for each in MODELS:
        stopping = agent(
            each, FORCED, tools=[weather], tool_use_behavior="stop_on_first_tool"
        )
        found = Runner.run_sync(stopping, "The weather in Rome?")
        assert found.final_output.endswith("sunny"), found.final_output
        # The result goes back to the model, which then answers freely.
        found = Runner.run_sync(
            agent(each, FORCED, tools=[weather]), "The weather in Rome?", max_turns=4
        )
        assert found.final_output is not None


def structured():
    for each in MODELS:
        found = Runner.run_sync(agent(each, LONGER, output_type=Color), "A color?")
        assert isinstance(found.final_output, Color), each


run(plain, stream, tools, structured)
