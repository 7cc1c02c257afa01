# /// script
# dependencies = ["openai"]
# ///
"""OpenAI's client for Python: chat, text, responses, embeddings, errors."""

import asyncio

import openai
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
    weather,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
OPTIONS = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


class Color(BaseModel):
    name: str
    is_warm: bool


def plain():
    answer = client.chat.completions.create(messages=MESSAGES, **OPTIONS)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens <= TOKENS
    text = client.completions.create(prompt="Once", n=2, logprobs=1, **OPTIONS)
    assert len(text.choices) == 2
    assert MODEL in [each.id for each in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def stream():
    whole = client.chat.completions.create(messages=MESSAGES, **OPTIONS)
    *chunks, last = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True},
        **OPTIONS,
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage == whole.usage
    # The accumulating helper.
    with client.chat.completions.stream(messages=MESSAGES, **OPTIONS) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == text


def tools():
    options = OPTIONS | {"max_tokens": 60}
    asked = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    message = client.chat.completions.create(**asked, **options).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    check_city(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": weather("Rome")}
    history = [*MESSAGES, message, result]
    after = client.chat.completions.create(messages=history, tools=[TOOL], **options)
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")
    parts = client.chat.completions.create(**asked, stream=True, **options)
    deltas = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    check_city("".join(delta.function.arguments or "" for delta in deltas))


def structured():
    named = {"name": "color", "strict": True, "schema": COLOR}
    shape = {"type": "json_schema", "json_schema": named}
    answer = client.chat.completions.create(
        messages=MESSAGES, response_format=shape, **OPTIONS
    )  # fmt: skip
    check_color(answer.choices[0].message.content)
    parsed = client.chat.completions.parse(
        messages=MESSAGES, response_format=Color, **OPTIONS | {"max_tokens": 200}
    )
    assert isinstance(parsed.choices[0].message.parsed, Color)


def responses():
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS}
    answer = client.responses.create(input=QUESTION, **options)
    assert "Paris" in answer.output_text
    kinds = [
        event.type
        for event in client.responses.create(input=QUESTION, stream=True, **options)
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds[-1]
    parsed = client.responses.parse(
        input=QUESTION, text_format=Color, **options | {"max_output_tokens": 200}
    )
    assert isinstance(parsed.output_parsed, Color)


def embeddings():
    one, two = client.embeddings.create(input=["a", "b"], model=MODEL).data
    assert len(one.embedding) == len(two.embedding) > 100


def errors():
    def ask(**wrong):
        options = OPTIONS | wrong
        return lambda: client.chat.completions.create(messages=MESSAGES, **options)

    missing = error_of(openai.NotFoundError, ask(model="not-served"))
    assert missing.code == "model_not_found"
    assert error_of(openai.BadRequestError, ask(n=0)).param == "n"


def asynchronous():
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as each:
            calls = [
                each.chat.completions.create(messages=MESSAGES, **OPTIONS)
                for _ in range(4)
            ]
            return await asyncio.gather(*calls)

    texts = {answer.choices[0].message.content for answer in asyncio.run(ask())}
    assert len(texts) == 1


run(plain, stream, tools, structured, responses, embeddings, errors, asynchronous)
