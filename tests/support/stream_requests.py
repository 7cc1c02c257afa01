"""Streamed requests of all kinds, and what their events say."""

from __future__ import annotations

import json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "Name three rivers."}]
LONG = {"ignore_eos": True, "max_tokens": 240, "return_token_ids": True}

CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 60}}}
CITY |= {"required": ["city"], "additionalProperties": False}

REQUESTS = {
    "greedy": (TEXT, {"prompt": [5, 6, 7], "temperature": 0, **LONG}),
    "sampled": (TEXT, {"prompt": list(range(70)), "seed": 3, **LONG}),
    "penalties": (TEXT, {"prompt": [5, 6, 7], "seed": 4, "frequency_penalty": 0.5}
                  | {"repetition_penalty": 1.2, **LONG}),
    "logprobs": (TEXT, {"prompt": [5, 6, 7, 8], "seed": 5, "logprobs": 2}
                 | LONG),
    "samples": (TEXT, {"prompt": [[9, 8, 7], [5, 5]], "seed": 6, "n": 2, **LONG}),
    "bans": (TEXT, {"prompt": [5, 6], "seed": 7, "min_tokens": 200, "max_tokens": 240}),
    "chat": (CHAT, {"messages": TALK, "seed": 8, "max_tokens": 240, "min_tokens": 240}),
    "schema": (CHAT, {"messages": TALK, "seed": 9, "max_tokens": 240}
               | {"response_format": {"type": "json_schema", "json_schema":
                  {"name": "city", "schema": CITY}}}),
    "messages": ("/v1/messages", {"model": "hash", "messages": TALK}
                 | {"max_tokens": 240, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "Rivers?", "max_output_tokens": 240}
                  | {"temperature": 0}),
}  # fmt: skip

TOOL = {"type": "function", "function": {"name": "visit", "parameters": CITY}}
REQUESTS["tools"] = (
    CHAT,
    {"messages": TALK, "seed": 10, "max_tokens": 240, "tools": [TOOL]}
    | {"tool_choice": {"type": "function", "function": {"name": "visit"}}},
)

QUICK = ("sampled", "penalties", "logprobs", "samples", "schema", "messages")

CHANGING = {"id", "item_id", "created", "created_at", "completed_at", "call_id"}
CHANGING |= {"response_id"}


def parsed(lines):
    """Return the events of a stream without what differs between two equal ones."""

    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [without_names(json.loads(data)) for data in datas if data != "[DONE]"]


TEXTS = ("content", "text", "delta", "arguments", "partial_json", "reasoning_content")
COUNTED = ("prompt_tokens", "completion_tokens", "output_tokens", "finish_reason")
COUNTED += ("stop_reason", "total_tokens")

LISTS = ("choices", "output", "content", "tool_calls")
"""Their items have an index, by which parts belong together."""


def joined(lines):
    """Return what a stream says, however its text is divided into events."""
    texts, lists, ends = {}, {}, []

    def add(value, path):
        if isinstance(value, dict):
            for name, item in value.items():
                add(item, (*path, name))
        elif isinstance(value, list) and path[-1] in LISTS:
            for item in value:
                at = item.get("index") if isinstance(item, dict) else None
                add(item, (*path, at))
        elif isinstance(value, list):
            lists[path] = lists.get(path, []) + value
        elif path[-1] in TEXTS and isinstance(value, str):
            texts[path] = texts.get(path, "") + value
        elif path[0] == "message_start":
            """Its usage has the tokens that there are by chance."""
        elif path[-1] in COUNTED and value is not None:
            ends.append((path, value))

    for event in parsed(lines):
        add(event, (event.get("type"),))
    assert texts
    assert ends
    return texts, lists, sorted(map(repr, ends))


def without_names(value):
    if isinstance(value, dict):
        return {k: without_names(v) for k, v in value.items() if k not in CHANGING}
    return [*map(without_names, value)] if isinstance(value, list) else value
