# /// script
# dependencies = ["langchain-openai", "langchain-ollama", "langchain-anthropic"]
# ///
"""LangChain's classes for OpenAI, Anthropic and Ollama."""

from typing import Literal

from cases import MODEL, QUESTION, TOKENS, URL, check_city, run
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

V1 = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL}
CHAT = ChatOpenAI(**V1, temperature=0, max_tokens=TOKENS)
RESPONSES = ChatOpenAI(**V1, temperature=0, max_tokens=TOKENS, use_responses_api=True)
ANTHROPIC = ChatAnthropic(
    base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=TOKENS
)
OLLAMA = ChatOllama(
    base_url=URL, model=MODEL, temperature=0, num_predict=TOKENS,
    validate_model_on_init=True,
)  # fmt: skip
MODELS = (CHAT, RESPONSES, ANTHROPIC, OLLAMA)


class Color(BaseModel):
    """A color, and whether it is a warm one."""

    name: Literal["red", "green", "blue"]
    is_warm: bool


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"{city}: sunny"


def plain():
    for each in MODELS:
        answer = each.invoke(QUESTION)
        assert "Paris" in answer.text, each
        assert 0 < answer.usage_metadata["output_tokens"] <= TOKENS, each
    assert OpenAI(**V1, max_tokens=8).invoke("Once")
    assert OllamaLLM(base_url=URL, model=MODEL, num_predict=8).invoke("Once")


def stream():
    for each in MODELS:
        chunks = list(each.stream(QUESTION))
        assert "".join(chunk.text for chunk in chunks) == each.invoke(QUESTION).text


def tools():
    for each in (CHAT, RESPONSES, ANTHROPIC):
        bound = each.bind_tools([weather], tool_choice="weather")
        called = bound.invoke("Rome?")
        (call,) = called.tool_calls
        check_city(call["args"])
        history = [("user", "The weather in Rome?"), called, weather.invoke(call)]
        each.bind_tools([weather]).invoke(history)
    OLLAMA.bind_tools([weather]).invoke("Rome?")


def structured():
    for each in MODELS:
        options = {} if each is ANTHROPIC else {"method": "json_schema"}
        found = each.with_structured_output(Color, **options).invoke("A color?")
        assert isinstance(found, Color), (each, found)
    found = CHAT.with_structured_output(Color, method="function_calling").invoke("?")
    assert isinstance(found, Color)


def embeddings():
    # By default it sends token ids of OpenAI's own tokenizers, which it downloads.
    texts = OpenAIEmbeddings(**V1, check_embedding_ctx_length=False)
    openai = texts.embed_documents(["a", "b"])
    ollama = OllamaEmbeddings(base_url=URL, model=MODEL).embed_documents(["a", "b"])
    assert len(openai) == len(ollama) == 2
    assert len(openai[0]) == len(ollama[0])


run(plain, stream, tools, structured, embeddings)
