"""The unmodified ``openai`` client against a server process with the default model."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from waiting import until

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(any_server_url):
    with openai.OpenAI(
        base_url=f"{any_server_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The engine's own greedy answers, without a server."""
    config = EngineConfig(backend="cpu", max_batch=4, context=2048)
    with InferenceEngine.from_pretrained(None, config) as engine:
        ids = engine.chat_ids(MESSAGES)
        chat = engine.generate(ids, max_tokens=12, logprobs=2)
        text = engine.generate("One, two,", max_tokens=6)
        seeded = [
            engine.generate(ids, max_tokens=8, temperature=1.0, seed=seed).text
            for seed in (7, 8)
        ]
    return {"chat": chat, "text": text, "seeded": seeded, "ids": ids}


def chat(client, **options):
    options = {"max_tokens": 12, "temperature": 0, "messages": MESSAGES, **options}
    return client.chat.completions.create(model="default", **options)


def test_a_chat_answer_is_the_engines(client, expected):
    answer = chat(client, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == expected["chat"].text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    scores = choice.logprobs.content
    assert [each.logprob for each in scores] == pytest.approx(
        [each.logprob for each in expected["chat"].logprobs], abs=1e-3
    )
    assert "".join(each.token for each in scores) == choice.message.content
    assert all(len(each.top_logprobs) == 2 for each in scores)
    assert answer.usage.prompt_tokens == len(expected["ids"])
    assert answer.usage.completion_tokens == 12


def test_a_stream_joins_to_the_answer(client, expected):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    text = "".join(each.delta.content or "" for each in deltas)
    assert text == expected["chat"].text
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["length"]


def test_a_repeated_prompt_reports_cached_tokens(client):
    chat(client)
    usage = chat(client).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16


def test_seeds_are_reproduced_and_drawn_per_request(client, expected):
    answer = chat(client, n=2, seed=7, temperature=1, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == expected["seeded"]
    drawn = chat(client, n=4, temperature=1.5, max_tokens=8).choices
    assert len({choice.message.content for choice in drawn}) > 1


def test_streams_of_several_choices_are_told_apart(client, expected):
    texts = ["", ""]
    stream = chat(client, n=2, seed=7, temperature=1, max_tokens=8, stream=True)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected["seeded"]


def test_completions_of_several_prompts(client, expected):
    answer = client.completions.create(
        model="default", prompt=["One, two,", "Red,"], n=2, max_tokens=6, temperature=0,
        echo=True,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == "One, two," + expected["text"].text
    assert answer.choices[1].text == answer.choices[0].text
    assert answer.usage.completion_tokens == 24


def test_a_stop_string_ends_the_text_before_it(client, expected):
    word = expected["chat"].text.split()[3]
    answer = chat(client, stop=[f" {word}"])
    assert answer.choices[0].finish_reason == "stop"
    assert (
        answer.choices[0].message.content == expected["chat"].text.split(f" {word}")[0]
    )


def test_an_answer_continues_its_beginning(client, expected):
    text = expected["chat"].text
    begun = text[: text.index(" ", 10)]
    answer = chat(
        client,
        messages=[*MESSAGES, {"role": "assistant", "content": begun}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert text.startswith(begun + answer.choices[0].message.content[:8])


REFUSED = {
    "unknown": ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    "type": ({"extra_body": {"temperature": "hot"}}, "temperature"),
    "range": ({"max_tokens": 0}, "max_tokens"),
    "image": (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]},
        "messages[0].content[0]",
    ),
    "long": ({"messages": [{"role": "user", "content": "a b " * 3000}]}, "prompt"),
    "bias": ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    "template": ({"extra_body": {"chat_template_kwargs": {"messages": []}}},
                 "chat_template_kwargs"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(client, case):
    options, param = REFUSED[case]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this server has default"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)


def embedded(client, texts, **options):
    found = client.embeddings.create(model="default", input=texts, **options)
    assert [each.index for each in found.data] == list(range(len(found.data)))
    return np.array([each.embedding for each in found.data]), found


def test_embeddings_of_texts_and_of_their_ids_are_equal(client):
    texts = ["A cat sits on a mat.", "Rain"]
    rows, found = embedded(client, texts)
    assert rows.shape[0] == 2
    assert np.allclose(np.square(rows).sum(1), 1, atol=1e-5)
    assert not np.allclose(rows[0], rows[1], atol=1e-2)
    post = client.with_options(max_retries=0).post
    ids = [
        post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"]
        for text in texts
    ]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    # The client requests base64 by default.
    assert np.allclose(embedded(client, ids, encoding_format="float")[0], rows)
    assert np.array_equal(embedded(client, ids[1])[0], embedded(client, "Rain")[0])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("", "no tokens"),
        ([], "length >= 1"),
        (["a", 1], "found int and str"),
        ([[1], "a"], "found list and str"),
        ([10**8], "accepts 0 to"),
        ([[]], "length >= 1"),
        (["a"] * 2049, "found 2049 texts"),
        ("word " * 10_000, "the context holds 2048 tokens"),
        ({}, "input"),
    ],
)
def test_embeddings_of_bad_input_are_refused(client, given, match):
    with pytest.raises(openai.BadRequestError, match=match) as caught:
        client.embeddings.create(model="default", input=given)
    assert caught.value.type == "invalid_request_error"


def test_the_first_dimensions_have_length_1(client):
    whole, _ = embedded(client, ["Rain"])
    short, _ = embedded(client, ["Rain"], dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8])
    assert np.allclose(short, expected, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions: found 9999"):
        client.embeddings.create(model="default", input="a", dimensions=9999)


def test_a_timeout_of_the_client_ends_the_request(client):
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5), max_tokens=1500,
             extra_body={"ignore_eos": True})  # fmt: skip
    until(lambda: not client.get("/../load", cast_to=object)["server_load"])


def test_tools_are_described_to_the_model(client):
    plain = chat(client, max_tokens=1).usage.prompt_tokens
    offered = chat(client, max_tokens=1, tools=[TOOL]).usage.prompt_tokens
    unused = chat(client, max_tokens=1, tools=[TOOL], tool_choice="none").usage
    assert offered > plain + 50
    assert unused.prompt_tokens == plain


def test_a_conversation_with_calls_and_results_is_accepted(client):
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    answer = chat(client, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content


def test_a_json_schema_is_followed(client):
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}},
              "required": ["answer"], "additionalProperties": False}  # fmt: skip
    named = {"name": "answer", "schema": schema, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    answer = chat(client, response_format=form, max_tokens=60)
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["answer"], int)


@pytest.mark.parametrize("choice", ["required", TOOL])
def test_a_tool_call_is_forced(client, choice):
    if choice is TOOL:
        choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(client, tools=[TOOL], tool_choice=choice, max_tokens=80)
    (only,) = answer.choices
    assert only.finish_reason == "tool_calls"
    (call,) = only.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


@pytest.mark.parametrize("question", ["Call get_weather for Paris.", "Say hello."])
def test_an_answer_with_tools_to_choose_is_well_formed(client, question):
    """A call or a text, as the model chooses; the stream has the same parts."""
    options = {
        "messages": [{"role": "user", "content": question}],
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_tokens": 48,
    }
    (whole,) = chat(client, **options).choices
    content, calls, reasons = "", {}, []
    for chunk in chat(client, stream=True, **options):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for part in choice.delta.tool_calls or ():
                if part.id:
                    assert part.index == len(calls), "each call begins with its id"
                    calls[part.index] = [part.function.name, ""]
                calls[part.index][1] += part.function.arguments or ""
    assert content == (whole.message.content or "")
    assert [*calls.values()] == [
        [call.function.name, call.function.arguments]
        for call in whole.message.tool_calls or ()
    ]
    assert reasons == [whole.finish_reason]
    assert content.strip() or calls
    # Nothing forces the name to be a known one, or the arguments to be JSON.
    assert all(name for name, _ in calls.values())
    assert calls or reasons != ["tool_calls"]


def test_responses_have_items_and_events(client, expected):
    options = {"model": "default", "input": MESSAGES, "temperature": 0}
    answer = client.responses.create(**options, max_output_tokens=12)
    assert answer.output_text == expected["chat"].text
    assert answer.status == "incomplete"
    assert answer.usage.output_tokens == 12
    events = list(client.responses.create(**options, max_output_tokens=12, stream=True))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == expected["chat"].text
    assert events[-1].response.temperature == answer.temperature == 0
    assert events[0].response.top_p == answer.top_p == 1


def test_responses_report_the_sampling_that_they_have(any_hash_server):
    """As numbers, which the API's description requires, with the model's defaults."""
    found = []
    for options in ({}, {"temperature": 0.5, "top_p": None}, {"top_p": 0.25}):
        body = {"input": "a", "max_output_tokens": 1, **options}
        status, _, answer = any_hash_server.send("POST", "/v1/responses", body)
        assert status == 200, answer
        found.append((answer["temperature"], answer["top_p"]))
    assert found == [(1, 1), (0.5, 1), (1, 0.25)]


def test_a_response_that_is_not_stored_is_not_continued(client):
    with pytest.raises(openai.NotFoundError, match="no stored response 'r'"):
        client.responses.create(model="default", input="a", previous_response_id="r")


def test_responses_ignore_tools_of_other_types(client):
    tools = [{"type": "web_search"}]
    answer = client.responses.create(
        model="default", input="a", tools=tools, max_output_tokens=1
    )
    assert answer.output[0].type == "message"
