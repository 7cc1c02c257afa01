# /// script
# dependencies = ["ollama"]
# ///
"""Ollama's client for Python."""

import ollama
from cases import (
    COLOR,
    MODEL,
    QUESTION,
    TOKENS,
    URL,
    check_city,
    check_color,
    error_of,
    run,
)

client = ollama.Client(host=URL)
MESSAGES = [{"role": "user", "content": QUESTION}]
OPTIONS = {"temperature": 0, "num_predict": TOKENS}


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city
    """
    return f"{city}: sunny"


def plain():
    answer = client.chat(MODEL, MESSAGES, options=OPTIONS)
    assert "Paris" in answer.message.content
    assert answer.done
    assert answer.eval_count <= TOKENS
    text = client.generate(MODEL, "Once", options=OPTIONS)
    more = client.generate(MODEL, " and", context=text.context, options=OPTIONS)
    assert len(more.context) > len(text.context)


def stream():
    whole = client.chat(MODEL, MESSAGES, options=OPTIONS)
    parts = list(client.chat(MODEL, MESSAGES, options=OPTIONS, stream=True))
    text = "".join(part.message.content or "" for part in parts)
    assert text == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    words = client.generate(MODEL, "Once", options=OPTIONS, stream=True)
    assert "".join(part.response for part in words)


def tools():
    # Ollama's API cannot force a call: the small model may answer in words.
    answer = client.chat(MODEL, MESSAGES, tools=[weather], options=OPTIONS)
    assert answer.message.content or answer.message.tool_calls
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    check_city(call["function"]["arguments"])
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": weather("Rome")},
    ]
    after = client.chat(MODEL, history, tools=[weather], options=OPTIONS)
    assert after.message.content or after.message.tool_calls
    list(client.chat(MODEL, history, tools=[weather], options=OPTIONS, stream=True))


def structured():
    answer = client.chat(MODEL, MESSAGES, format=COLOR, options=OPTIONS)
    check_color(answer.message.content)
    check_color(client.generate(MODEL, "A color:", format=COLOR).response)


def models():
    assert any(each.model.startswith(MODEL) for each in client.list().models)
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo
    assert any(each.model.startswith(MODEL) for each in client.ps().models)


def embeddings():
    one, two = client.embed(MODEL, ["a", "b"]).embeddings
    assert len(one) == len(two) > 100
    assert len(client.embeddings(MODEL, "a").embedding) == len(one)


def errors():
    for call in (
        lambda: client.chat("not-served", MESSAGES),
        lambda: client.show("not-served"),
        lambda: list(client.chat("not-served", MESSAGES, stream=True)),
    ):
        error = error_of(ollama.ResponseError, call)
        assert error.status_code == 404, error
        assert "not-served" in error.error


run(plain, stream, tools, structured, models, embeddings, errors)
