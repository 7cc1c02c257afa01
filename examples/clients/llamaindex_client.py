"""LlamaIndex with a model that ``inl serve`` runs.

pip install llama-index-llms-openai-like
inl serve --name default &
python examples/clients/llamaindex_client.py http://127.0.0.1:8000
"""

import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Return the weather of a city for some days."""
    return f"{city}: sunny for {days} days"


def run(url: str) -> dict[str, Any]:
    """Return what a chat, a stream, a tool call and structured output gave."""
    model = OpenAILike(
        api_base=f"{url}/v1", api_key="none", model="default", temperature=0,
        max_tokens=48, is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    question = [ChatMessage("Why is the sky blue? One sentence.")]
    answer = model.chat(question)
    chunks = [chunk.delta for chunk in model.stream_chat(question)]
    tool = FunctionTool.from_defaults(weather)
    # The small default model calls no tool unless it must.
    called = model.chat_with_tools([tool], "Rome?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(called)
    result = ChatMessage(
        str(tool(**call.tool_kwargs)), role="tool",
        additional_kwargs={"tool_call_id": call.tool_id},
    )  # fmt: skip
    history = [ChatMessage("The weather in Rome?"), called.message, result]
    return {
        "chat": answer.message.content,
        "tokens": answer.raw.usage.completion_tokens,
        "stream": "".join(chunk or "" for chunk in chunks),
        "chunks": sum(map(bool, chunks)),
        "call": {"name": call.tool_name, "args": call.tool_kwargs},
        "after the call": model.chat(history).message.content,
        "structured": model.structured_predict(Color, PromptTemplate("A color?")),
    }


if __name__ == "__main__":
    for name, value in run(sys.argv[1]).items():
        print(f"{name}: {value}")
