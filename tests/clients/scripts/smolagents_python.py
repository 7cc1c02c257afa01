# /// script
# dependencies = ["smolagents[openai]"]
# ///
"""smolagents: its model for servers like OpenAI's, and an agent with a tool."""

from cases import MODEL, QUESTION, TOKENS, URL, check_color, run
from smolagents import (
    ChatMessage,
    MessageRole,
    OpenAIServerModel,
    ToolCallingAgent,
    tool,
)

ASKED = [ChatMessage(MessageRole.USER, [{"type": "text", "text": QUESTION}])]
COLOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["red", "green", "blue"]},
        "is_warm": {"type": "boolean"},
    },
    "required": ["name", "is_warm"],
}


@tool
def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city
    """
    return f"{city}: sunny"


def language_model(tokens=TOKENS):
    return OpenAIServerModel(
        MODEL, api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=tokens
    )


def plain():
    found = language_model().generate(ASKED, stop_sequences=["Observation:"])
    assert "Paris" in found.content
    assert found.token_usage.output_tokens <= TOKENS


def stream():
    parts = [part.content or "" for part in language_model().generate_stream(ASKED)]
    assert "Paris" in "".join(parts)


def tools():
    # Its agent forces a call in each step ("required").
    agent = ToolCallingAgent(
        tools=[weather], model=language_model(80), max_steps=2, verbosity_level=0
    )
    agent.run("The weather in Rome?")
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps
    assert steps[0].tool_calls[0].name in ("weather", "final_answer")


def structured():
    shape = {"name": "color", "strict": True, "schema": COLOR}
    found = language_model(60).generate(
        ASKED, response_format={"type": "json_schema", "json_schema": shape}
    )
    check_color(found.content)


run(plain, stream, tools, structured)
