# /// script
# dependencies = [
#     "llama-index-llms-openai-like", "llama-index-llms-ollama",
#     "llama-index-embeddings-ollama", "llama-index-embeddings-openai-like",
# ]
# ///
"""LlamaIndex's classes for servers like OpenAI's, and for Ollama."""

from typing import Literal

from cases import MODEL, QUESTION, TOKENS, URL, check_city, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

OPENAI = OpenAILike(
    api_base=f"{URL}/v1", api_key="none", model=MODEL, temperature=0,
    max_tokens=TOKENS, is_chat_model=True, is_function_calling_model=True,
)  # fmt: skip
OLLAMA = Ollama(
    base_url=URL, model=MODEL, temperature=0, request_timeout=300,
    additional_kwargs={"num_predict": TOKENS},
)  # fmt: skip
MODELS = (OPENAI, OLLAMA)
MESSAGES = [ChatMessage(QUESTION)]


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"{city}: sunny"


def plain():
    for each in MODELS:
        assert "Paris" in each.chat(MESSAGES).message.content
        assert each.complete("Once").text


def stream():
    for each in MODELS:
        text = "".join(chunk.delta or "" for chunk in each.stream_chat(MESSAGES))
        assert text == each.chat(MESSAGES).message.content


def tools():
    tool = FunctionTool.from_defaults(weather)
    called = OPENAI.chat_with_tools([tool], "Rome?", tool_required=True)
    (call,) = OPENAI.get_tool_calls_from_response(called)
    check_city(call.tool_kwargs)
    result = ChatMessage(
        str(tool(**call.tool_kwargs)), role="tool",
        additional_kwargs={"tool_call_id": call.tool_id},
    )  # fmt: skip
    OPENAI.chat([ChatMessage("The weather in Rome?"), called.message, result])
    OLLAMA.chat_with_tools([tool], "Rome?")


def structured():
    for each in MODELS:
        found = each.structured_predict(Color, PromptTemplate("A color?"))
        assert isinstance(found, Color), each


def embeddings():
    openai = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none")
    ollama = OllamaEmbedding(model_name=MODEL, base_url=URL)
    for each in (openai, ollama):
        assert len(each.get_text_embedding_batch(["a", "b"])) == 2


run(plain, stream, tools, structured, embeddings)
