"""LangChain with a model that ``inl serve`` runs.

pip install langchain-openai
inl serve --name default &
python examples/clients/langchain_client.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


@tool
def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Return the weather of a city for some days."""
    return f"{city}: sunny for {days} days"


def run(url: str) -> dict[str, Any]:
    """Return what a chat, a stream, a tool call and structured output gave."""
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="default", temperature=0,
        max_tokens=48,
    )  # fmt: skip
    question = "Why is the sky blue? One sentence."
    answer = model.invoke(question)
    chunks = list(model.stream(question))
    # The small default model calls no tool unless it must.
    called = model.bind_tools([weather], tool_choice="weather").invoke("Rome?")
    (call,) = called.tool_calls
    history = [("user", "The weather in Rome?"), called, weather.invoke(call)]
    return {
        "chat": answer.content,
        "tokens": answer.usage_metadata["output_tokens"],
        "stream": "".join(chunk.content for chunk in chunks),
        "chunks": sum(bool(chunk.content) for chunk in chunks),
        "call": {"name": call["name"], "args": call["args"]},
        "after the call": model.invoke(history).content,
        "structured": model.with_structured_output(Color).invoke("A color?"),
    }


if __name__ == "__main__":
    for name, value in run(sys.argv[1]).items():
        print(f"{name}: {value}")
