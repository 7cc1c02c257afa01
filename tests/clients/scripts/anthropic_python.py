# /// script
# dependencies = ["anthropic"]
# ///
"""Anthropic's client for Python."""

from functools import partial

import anthropic
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

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
OPTIONS = {
    "model": MODEL, "max_tokens": TOKENS, "extra_body": {"temperature": 0},
}  # fmt: skip
TOOL = {"name": "weather", "description": "Weather.", "input_schema": WEATHER}


def plain():
    answer = client.messages.create(messages=MESSAGES, system="Be brief.", **OPTIONS)
    assert answer.content[0].text
    assert answer.usage.output_tokens <= TOKENS
    count = client.messages.count_tokens(messages=MESSAGES, model=MODEL)
    assert count.input_tokens > 5
    assert MODEL in [each.id for each in client.models.list()]


def stream():
    whole = client.messages.create(messages=MESSAGES, **OPTIONS)
    with client.messages.stream(messages=MESSAGES, **OPTIONS) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def tools():
    asked = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    options = OPTIONS | asked | {"max_tokens": 60}
    answer = client.messages.create(messages=MESSAGES, **options)
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    check_city(call.input)
    result = {
        "type": "tool_result", "tool_use_id": call.id, "content": weather("Rome"),
    }  # fmt: skip
    history = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(messages=history, tools=[TOOL], **OPTIONS)
    assert after.content
    with client.messages.stream(messages=MESSAGES, **options) as events:
        check_city(events.get_final_message().content[-1].input)


def structured():
    answer = client.messages.create(
        messages=MESSAGES, **OPTIONS,
        output_config={"format": {"type": "json_schema", "schema": COLOR}},
    )  # fmt: skip
    check_color(answer.content[0].text)


def errors():
    options = {"messages": MESSAGES, "model": "not-served", "max_tokens": 4}
    ask = partial(client.messages.create, **options)
    assert error_of(anthropic.NotFoundError, ask).body["type"] == "error"


run(plain, stream, tools, structured, errors)
