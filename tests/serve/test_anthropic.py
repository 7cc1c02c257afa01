"""The unmodified ``anthropic`` client against a server process."""

from __future__ import annotations

import anthropic
import pytest

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"
SYSTEM = "You are a careful assistant who answers in one short sentence only, please."
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(any_server_url):
    with anthropic.Anthropic(
        base_url=any_server_url, api_key="none", max_retries=0
    ) as client:
        yield client


def create(client, **options):
    options = {"max_tokens": 12, "messages": MESSAGES, "extra_body": GREEDY, **options}
    return client.messages.create(model="default", **options)


def test_a_message_and_its_stream_are_equal(client):
    answer = create(client)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 12
    with client.messages.stream(
        model="default", max_tokens=12, messages=MESSAGES, extra_body=GREEDY
    ) as stream:
        events = [event.type for event in stream]
        last = stream.get_final_message()
    assert last.content[0].text == answer.content[0].text
    assert last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 12
    raw = [event for event in events if event != "text"]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_text_has_no_citations(client):
    """The AI SDK's provider refuses null; the API's description requires the field."""
    raw = client.messages.with_raw_response.create(
        model="default", max_tokens=3, messages=MESSAGES
    )
    (block,) = raw.http_response.json()["content"]
    assert block.keys() == {"type", "text", "citations"}
    assert block["citations"] == []


def test_a_stop_sequence_is_named(client):
    text = create(client).content[0].text
    word = text.split()[3]
    answer = create(client, stop_sequences=["never", f" {word}"])
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == f" {word}"
    assert answer.content[0].text == text.split(f" {word}")[0]


@pytest.mark.parametrize("form", ["text", "blocks"])
def test_a_changing_billing_line_keeps_the_cached_prefix(client, form):
    usages = []
    for turn in range(2):
        text = BILLING.format(f"{form}{turn}") + SYSTEM
        cache = {"type": "ephemeral"} if turn else None
        block = {"type": "text", "text": text, "cache_control": cache}
        system = text if form == "text" else [block]
        usages.append(create(client, system=system, max_tokens=1).usage)
    last = usages[1]
    total = last.input_tokens + last.cache_read_input_tokens
    assert last.cache_read_input_tokens == total // 16 * 16


def test_counted_tokens_are_those_of_the_prompt(client):
    options = {"model": "default", "messages": MESSAGES, "system": SYSTEM}
    counted = client.messages.count_tokens(**options).input_tokens
    usage = create(client, system=SYSTEM, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_tool_results_are_messages(client):
    tool = {"name": "look", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1",
              "content": [{"type": "text", "text": "blue"}]}  # fmt: skip
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, use]},
        {"role": "user", "content": [result]},
    ]
    assert create(client, messages=messages, tools=[tool]).content


def test_a_tool_call_is_forced_and_streamed(client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    options = {"tools": [{"name": "look", "input_schema": schema}], "max_tokens": 60}
    options |= {"tool_choice": {"type": "any"}, "messages": MESSAGES}
    answer = create(client, **options)
    assert answer.stop_reason == "tool_use"
    with client.messages.stream(
        model="default", extra_body=GREEDY, **options
    ) as stream:
        streamed = stream.get_final_message()
    for message in (answer, streamed):
        (block,) = message.content
        assert (block.type, block.name) == ("tool_use", "look")
        assert block.input == {"city": "Rome"}
        assert block.caller.type == "direct"


def test_images_are_refused_by_place(client):
    image = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, messages=[{"role": "user", "content": [image]}])
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("messages[0].content[0]:")


def test_errors_have_anthropics_shape(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, extra_body={"guided_json": {}})
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=1, messages=MESSAGES)
