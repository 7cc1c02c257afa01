# /// script
# dependencies = ["litellm"]
# ///
"""LiteLLM by three of its providers: ``openai/``, ``anthropic/``, ``ollama_chat/``."""

from functools import partial

import litellm
from cases import (
    COLOR,
    MODEL,
    QUESTION,
    TOKENS,
    URL,
    WEATHER,
    check_city,
    check_color,
    error_of,
    run,
)

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER},
}
FORCING = [
    {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    {"model": f"anthropic/{MODEL}", "api_base": URL},
    {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
]
OLLAMA = [
    {"model": f"ollama/{MODEL}", "api_base": URL},
    {"model": f"ollama_chat/{MODEL}", "api_base": URL},
]
PLACES = FORCING + OLLAMA
OPTIONS = {
    "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS, "api_key": "none",
    "num_retries": 0,
}  # fmt: skip


def plain():
    for place in PLACES:
        answer = litellm.completion(**place, **OPTIONS)
        assert answer.choices[0].message.content, place
        assert answer.usage.completion_tokens <= TOKENS, place


def stream():
    for place in PLACES:
        whole = litellm.completion(**place, **OPTIONS)
        parts = litellm.completion(**place, **OPTIONS, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content, place


def tools():
    for place in FORCING:
        answer = litellm.completion(
            **place,
            **OPTIONS | {"max_tokens": 60},
            tools=[TOOL],
            tool_choice="required",
        )
        (call,) = answer.choices[0].message.tool_calls
        check_city(call.function.arguments)
    for place in OLLAMA:
        litellm.completion(**place, **OPTIONS, tools=[TOOL])


def structured():
    shape = {"name": "color", "strict": True, "schema": COLOR}
    kind = {"type": "json_schema", "json_schema": shape}
    for place in PLACES:
        answer = litellm.completion(
            **place, **OPTIONS | {"max_tokens": 60}, response_format=kind
        )
        check_color(answer.choices[0].message.content)


def embeddings():
    for name, base in (
        (f"openai/{MODEL}", f"{URL}/v1"),
        (f"ollama/{MODEL}", URL),
    ):
        found = litellm.embedding(name, ["a", "b"], api_base=base, api_key="none")
        assert len(found.data) == 2
        assert len(found.data[0]["embedding"]) > 100


def errors():
    for place in PLACES:
        name = place["model"].split("/")[0] + "/not-served"
        ask = partial(litellm.completion, **place | {"model": name}, **OPTIONS)
        assert "not-served" in str(error_of(Exception, ask)), place


run(plain, stream, tools, structured, embeddings, errors)
