"""Every field of a request takes effect, or is named here as one that asks for nothing.

Null is absent, everywhere but in objects of any content, such as JSON schemas.
"""

from __future__ import annotations

import json

import msgspec
import pytest

from inl.serve.anthropic.exchange import MessagesExchange
from inl.serve.anthropic.messages import CountRequest, MessagesRequest
from inl.serve.api_error import ApiError
from inl.serve.conversions import DetokenizeRequest, TokenizeRequest
from inl.serve.dialect import parse
from inl.serve.ollama.exchange import OllamaChatExchange, OllamaGenerateExchange
from inl.serve.ollama.fields import Options
from inl.serve.ollama.messages import GenerateRequest, OllamaChatRequest
from inl.serve.openai.chat import CHAT_DEFAULTS, ChatExchange, ChatRequest
from inl.serve.openai.completions import CompletionExchange, CompletionRequest
from inl.serve.openai.embeddings import EmbeddingsRequest
from inl.serve.openai.fields import DEFAULTS
from inl.serve.openai.responses import ResponsesRequest
from inl.serve.openai.responses_exchange import ResponsesExchange

TURN = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"x": {"default": None}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
REPLY_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}
DIALECTS = {
    "chat": (ChatExchange, ChatRequest, {"messages": [TURN], "tools": [CHAT_TOOL]}),
    "completions": (CompletionExchange, CompletionRequest, {"prompt": "Hi"}),
    "responses": (ResponsesExchange, ResponsesRequest,
                  {"input": "Hi", "tools": [REPLY_TOOL]}),
    "messages": (MessagesExchange, MessagesRequest,
                 {"messages": [TURN], "max_tokens": 9, "tools": [ANTHROPIC_TOOL]}),
    "ollama chat": (OllamaChatExchange, OllamaChatRequest,
                    {"messages": [TURN], "tools": [CHAT_TOOL]}),
    "ollama generate": (OllamaGenerateExchange, GenerateRequest, {"prompt": "Hi"}),
}  # fmt: skip

SHARED = {
    "model": "b", "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
    "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1,
    "frequency_penalty": 1, "logit_bias": {"5": 1}, "allowed_token_ids": [5],
    "min_tokens": 1, "bad_words": ["a"], "seed": 5, "prompt_logprobs": 1,
    "prompt_logprobs_start": 1, "priority": 1,
    "timeout_seconds": 9, "stop": "a", "stop_token_ids": [5], "ignore_eos": True,
    "skip_special_tokens": False, "cache_salt": "a", "stream": True,
    "return_token_ids": True, "response_format": FORMAT,
    "structured_outputs": {"regex": "a"}, "guided_json": SCHEMA, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": 'start: "a"',
}  # fmt: skip
OLLAMA = {
    "model": "b", "stream": False, "format": "json", "options": {"num_predict": 3},
    "think": False, "logprobs": True, "temperature": 0, "top_p": 0.5,
    "max_output_tokens": 3,
}  # fmt: skip
EFFECTS = {
    "chat": SHARED | {
        "messages": [TURN, TURN], "max_completion_tokens": 3, "logprobs": True,
        "tools": [], "tool_choice": "required", "parallel_tool_calls": False,
        "reasoning_effort": "low", "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
    },
    "completions": SHARED | {
        "prompt": "a", "logprobs": 1, "echo": True, "suffix": "a",
    },
    "responses": {
        "input": "a", "model": "b", "instructions": "a", "max_output_tokens": 3,
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "top_logprobs": 2, "tools": [],
        "tool_choice": "required", "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"}, "stream": True, "parallel_tool_calls": False,
        "include": ["message.output_text.logprobs"],
    },
    "messages": {
        "messages": [TURN, TURN], "model": "b", "system": "a", "tools": [],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
        "stop_sequences": ["a"], "stream": True,
    },
    "ollama chat": OLLAMA | {"messages": [TURN, TURN], "tools": []},
    "ollama generate": OLLAMA | {
        "prompt": "a", "system": "a", "context": [1], "raw": True,
        "suffix": "a", "images": ["aaaa"],
    },
}  # fmt: skip
WITH_OTHERS = {
    "chat": {"top_logprobs": {"logprobs": True, "top_logprobs": 3},
             "stream_options": {"stream": True,
                                "stream_options": {"include_usage": True}},
             "continue_final_message": {
                 "messages": [TURN, {"role": "assistant", "content": "a"}],
                 "continue_final_message": True}},
    "completions": {"stream_options": {"stream": True,
                                       "stream_options": {"include_usage": True}}},
    "responses": {}, "messages": {},
    "ollama chat": {"top_logprobs": {"logprobs": True, "top_logprobs": 3}},
    "ollama generate": {"top_logprobs": {"logprobs": True, "top_logprobs": 3}},
}  # fmt: skip
"""Fields that take effect together with others, which take effect too."""

REFUSED = {
    "responses": {"conversation": "a", "background": True},
    "chat": {}, "completions": {}, "messages": {}, "ollama chat": {},
    "ollama generate": {"template": "a"},
}  # fmt: skip
ACCOUNTING = {
    "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "client_metadata", "inference_geo",
    "cache_control",
}  # fmt: skip
"""Who asks, what is billed and kept: nothing that changes an answer."""

ELSEWHERE = {
    "guided_decoding_backend": "there is one, which reads all these languages",
    "keep_alive": "the server's --idle-unload holds, documented as without effect",
    "shift": "a prompt that is too long is an error",
    "truncate": "a prompt that is too long is an error",
    "modalities": "only text is accepted",
    "stream_options": "of responses: pads events, to hide their lengths",
    "truncation": "a prompt that is too long is an error",
    "max_tool_calls": "limits tools that run at the server, of which there are none",
    "previous_response_id": "found once the request is admitted",
    "context_management": "edits at the server, documented as without effect",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_table_has_every_field(dialect):
    _, schema, _ = DIALECTS[dialect]
    named = {*EFFECTS[dialect], *WITH_OTHERS[dialect], *REFUSED[dialect]}
    fields = set(schema.__struct_fields__)
    assert named <= fields
    assert fields - named <= ACCOUNTING | ELSEWHERE.keys()


def outcome(dialect, **fields):
    """Return what a request asks for."""
    make, _, base = DIALECTS[dialect]
    exchange = make(json.dumps({**base, **fields}).encode(), "1", "m")
    names = "stream_options", "_echo", "_has_token_ids", "_has_logprobs"
    return exchange.job, [getattr(exchange, name, None) for name in names]


@pytest.mark.parametrize(
    ("dialect", "name"), [(d, n) for d, fields in EFFECTS.items() for n in fields]
)
def test_a_field_takes_effect_and_null_is_absent(dialect, name):
    base = outcome(dialect)
    assert outcome(dialect, **{name: EFFECTS[dialect][name]}) != base
    if name in ("messages", "prompt") and dialect.startswith("ollama"):
        (prompt,) = outcome(dialect, **{name: None})[0].prompts
        assert prompt == [0], "only loads the model"
    elif name in ("messages", "prompt", "input") or (dialect, name) == (
        "messages", "max_tokens",
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            outcome(dialect, **{name: None})
        assert caught.value.status == 400
    elif name != "tools":
        assert outcome(dialect, **{name: None}) == base


@pytest.mark.parametrize(
    ("dialect", "name"), [(d, n) for d, fields in WITH_OTHERS.items() for n in fields]
)
def test_a_field_takes_effect_with_others(dialect, name):
    fields = WITH_OTHERS[dialect][name]
    without = {**fields, name: None}
    assert outcome(dialect, **fields) != outcome(dialect, **without)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json", SCHEMA),
        ("json", json.dumps(SCHEMA)),
        ("regex", "a"),
        ("choice", ["a"]),
        ("grammar", 'start: "a"'),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_fields_of_older_vllm_are_those_of_structured_outputs(dialect, field, value):
    now = {"structured_outputs": {field: value}}
    old = {f"guided_{field}": value}
    assert outcome(dialect, **old, guided_decoding_backend="xgrammar") == outcome(
        dialect, **now
    )
    assert outcome(dialect, **old, **now) == outcome(dialect, **now)
    with pytest.raises(ApiError, match=f"guided_{field}: differs from"):
        outcome(dialect, **old, structured_outputs={"regex": "b"})


@pytest.mark.parametrize("given", [True, False, {"type": "integer"}])
def test_a_schema_that_states_other_properties_stays_as_it_is(given):
    schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": given}
    job, _ = outcome("chat", structured_outputs={"json": schema})
    assert job.structure == {"json_schema": schema}


@pytest.mark.parametrize("dialect", ["ollama chat", "ollama generate"])
def test_options_come_before_fields_beside_them(dialect):
    beside = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7}
    named = {"temperature": 0, "top_p": 1, "num_predict": 3}
    assert outcome(dialect, **beside, options=named) == outcome(dialect, options=named)
    given = outcome(dialect, **beside)[0].options
    assert [given[name] for name in ("temperature", "top_p", "max_tokens")] == [
        0.5, 0.25, 7,
    ]  # fmt: skip


def test_ollama_leaves_calls_to_the_model():
    assert outcome("ollama chat", tool_choice="auto") == outcome("ollama chat")
    with pytest.raises(ApiError, match=r"tool_choice: .* accepts 'auto'"):
        outcome("ollama chat", tool_choice="required")


@pytest.mark.parametrize(
    ("dialect", "name"), [(d, n) for d, fields in REFUSED.items() for n in fields]
)
def test_what_has_no_effect_is_refused(dialect, name):
    with pytest.raises(ApiError):
        outcome(dialect, **{name: REFUSED[dialect][name]})
    assert outcome(dialect, **{name: None}) == outcome(dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_unknown_fields_may_be_null_only(dialect):
    assert outcome(dialect, prediction=None, web_search=None) == outcome(dialect)
    with pytest.raises(ApiError, match=r"prediction: is not supported"):
        outcome(dialect, prediction={}, web_search=None)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (EmbeddingsRequest, {"input": "a"}),
        (TokenizeRequest, {"prompt": "a"}),
        (DetokenizeRequest, {"tokens": [1]}),
        (CountRequest, {"messages": [TURN]}),
    ],
)
def test_null_is_absent_in_other_requests(schema, body):
    given = json.dumps(body).encode()
    names = set(schema.__struct_fields__) - set(body)
    for name in names:
        nulled = json.dumps({**body, name: None}).encode()
        found, wanted = parse(nulled, schema), parse(given, schema)
        assert all(
            getattr(found, each) in (None, getattr(wanted, each))
            for each in schema.__struct_fields__
        )


def test_null_is_absent_in_nested_objects():
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "audio": None}
    options = {"include_usage": True, "continuous_usage_stats": None, "b": None}
    job, (found, *_) = outcome(
        "chat", messages=[TURN, answer], stream=True, stream_options=options
    )
    assert found.include_usage
    (conversation,) = job.prompts
    assert conversation.messages[1]["tool_calls"][0]["function"]["name"] == "f"


def test_schemas_keep_their_nulls():
    body = {"messages": [TURN], "tools": [CHAT_TOOL], "prediction": None}
    request = parse(json.dumps(body).encode(), ChatRequest)
    assert request.tools[0].function.parameters == SCHEMA


OTHERS = [("chat", CHAT_DEFAULTS), ("completions", DEFAULTS)]


@pytest.mark.parametrize(
    ("dialect", "name", "value"),
    [
        (dialect, name, value)
        for dialect, table in OTHERS
        for name, values in table.items()
        for value in values
    ],
)
def test_defaults_of_other_servers_are_accepted(dialect, name, value):
    assert outcome(dialect, **{name: value}) == outcome(dialect)
    with pytest.raises(ApiError, match=rf"{name}: is not supported, accepts") as caught:
        outcome(dialect, **{name: "other"})
    assert caught.value.param == name


def test_true_is_not_the_number_one():
    with pytest.raises(ApiError):
        outcome("completions", best_of=True)


def test_allowed_tools_are_the_only_ones():
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    some = [{"type": "function", "function": {"name": name}} for name in "fh"]
    flat = [{"type": "function", "name": name} for name in "fh"]
    chat = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": some},
    }
    reply = {"type": "allowed_tools", "mode": "required", "tools": flat}
    flat_tools = [{"type": "function", "name": name} for name in "fgh"]
    for job, _ in (
        outcome("chat", tools=tools, tool_choice=chat),
        outcome("responses", tools=flat_tools, tool_choice=reply),
    ):
        (found,) = job.prompts
        assert [tool.name for tool in found.tools] == ["f", "h"]
        assert (found.tool_choice, found.only_tools) == ("required", True)
    with pytest.raises(ApiError, match="found 'f', which is no tool"):
        outcome("chat", tools=tools[1:], tool_choice={
            "type": "allowed_tools", "allowed_tools": {"tools": some[:1]}})  # fmt: skip


CALL = '<tool_call>{"name": "f", "arguments": {"x": %d}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_one_call_if_asked(any_hash_server, stream):
    """A choice of one text makes the model write it."""
    text = "Well. " + CALL % 1 + CALL % 2 + " done"
    for parallel, right in ((True, 2), (None, 2), (False, 1)):
        body = {"messages": [TURN], "tools": [CHAT_TOOL], "max_tokens": 300,
                "structured_outputs": {"choice": [text]}, "stream": stream,
                "stream_options": {"include_usage": True} if stream else None,
                "return_token_ids": True, "parallel_tool_calls": parallel
                }  # fmt: skip
        status, _, found = any_hash_server.send("POST", "/v1/chat/completions", body)
        assert status == 200, found
        if stream:
            lines = found.decode().split("\n\n")
            data = [json.loads(e[6:]) for e in lines if e[6:] not in ("", "[DONE]")]
            usage = data.pop()["usage"]
            choices = [event["choices"][0] for event in data]
            names = [c for e in choices for c in e["delta"].get("tool_calls", ())
                     if "id" in c]  # fmt: skip
            content = "".join(e["delta"].get("content") or "" for e in choices)
            reason = choices[-1]["finish_reason"]
            ids = [token for e in choices for token in e.get("token_ids", ())]
        else:
            (choice,) = found["choices"]
            names, reason = choice["message"]["tool_calls"], choice["finish_reason"]
            content = choice["message"]["content"]
            ids, usage = choice["token_ids"], found["usage"]
        assert (len(names), reason) == (right, "tool_calls")
        assert content == "Well." + ("done" if right == 2 else "")
        assert usage["completion_tokens"] == len(ids)
    any_hash_server.wait_idle()


def test_no_new_tokens_score_the_prompt(any_hash_server):
    body = {"prompt": "One two", "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    status, _, answer = any_hash_server.send("POST", "/v1/completions", body)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("One two", "length")
        assert "".join(choice["logprobs"]["tokens"]) == "One two"
        assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert answer["usage"]["completion_tokens"] == 0


def test_every_null_costs_the_same():
    """Removing nulls takes one pass, however many there are."""
    calls = [{"id": None, "function": {"name": "f", "arguments": None}}] * 10000
    turn = {"role": "assistant", "content": "a", "tool_calls": calls}
    request = parse(json.dumps({"messages": [turn]}).encode(), ChatRequest)
    assert len(request.messages[0].tool_calls) == 10000
    assert msgspec.to_builtins(request.messages[0].tool_calls[0])["id"] == ""


OPTIONS = {
    "num_predict": 3, "temperature": 0.1, "top_k": 3, "top_p": 0.3, "min_p": 0.2,
    "seed": 0, "stop": ["a"], "repeat_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}  # fmt: skip
SAME = {
    "num_predict": -1, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": -1,
    "stop": [], "repeat_penalty": 1, "repeat_last_n": 64, "penalize_newline": False,
    "typical_p": 1, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 3, "mirostat_eta": 0.3,
    "num_ctx": 8192, "num_keep": 4, "num_batch": 8, "num_gpu": 99, "main_gpu": 0,
    "num_thread": 8, "numa": True, "low_vram": True, "f16_kv": True, "use_mmap": True,
    "use_mlock": True, "logits_all": True, "vocab_only": False, "embedding_only": False,
}  # fmt: skip
"""Ollama's defaults, and what is set where the server starts."""

OFF = {"typical_p": 0.5, "tfs_z": 0.5, "mirostat": 2, "num_foo": 1}
WITH_PENALTY = {"repeat_last_n": 64, "penalize_newline": False}


@pytest.mark.parametrize("dialect", ["ollama chat", "ollama generate"])
def test_each_option_of_ollama_takes_effect_asks_for_nothing_or_is_refused(dialect):
    assert {*OPTIONS, *SAME, *OFF} - {"num_foo"} >= {*Options.__struct_fields__} - {
        "min_p"
    }
    base = outcome(dialect)
    for name, value in OPTIONS.items():
        assert outcome(dialect, options={name: value}) != base, name
        assert outcome(dialect, options={name: None}) == base, name
    for name, value in SAME.items():
        assert outcome(dialect, options={name: value}) == base, name
    for name, value in OFF.items():
        with pytest.raises(ApiError, match=rf"^options\.{name}: "):
            outcome(dialect, options={name: value})
    for name, value in WITH_PENALTY.items():
        with pytest.raises(ApiError, match=rf"^options\.{name}: "):
            outcome(dialect, options={name: value, "repeat_penalty": 1.1})
    given = {"repeat_penalty": 1.1, "repeat_last_n": -1}
    assert outcome(dialect, options=given)[0].options["repetition_penalty"] == 1.1
    assert outcome(dialect, options=given | {"repeat_last_n": 0}) == base
