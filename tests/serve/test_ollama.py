"""Ollama's dialect: answers, streams, models, refusals; its requests as clients send
them, recorded by hand from Open WebUI.
"""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from http_servers import HashServer
from inl.engine import stored_models
from inl.engine.stored_models import read_card
from inl.errors import CheckpointError, RequestError
from inl.serve.job import Answer, CallDelta, Delta, Usage
from inl.serve.ollama import store
from inl.serve.ollama.exchange import OllamaChatExchange
from inl.serve.ollama.fields import seconds_of
from inl.serve.ollama.messages import OllamaMessage, template_messages
from model_servers import ModelServer, Source

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
SHORT = {"num_predict": 8, "temperature": 0}
KEY = {"authorization": "Bearer operator"}

# What Open WebUI sends for a chat with parameters set, and beside it.
OPEN_WEBUI_CHAT = {
    "model": "hash:latest",
    "messages": [
        {"role": "system", "content": "Answer shortly."},
        {"role": "user", "content": "Why is the sky blue?", "images": []},
    ],
    "options": {
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "num_ctx": 4096,
        "num_predict": 8, "repeat_last_n": 64, "repeat_penalty": 1.0, "mirostat": 0,
        "seed": 5, "stop": ["never"], "num_gpu": 99, "use_mmap": True,
    },
    "stream": True,
    "keep_alive": "5m",
}  # fmt: skip
OPEN_WEBUI_GETS = ("/api/version", "/api/tags", "/api/ps")


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def ask(server, path, **body):
    status, headers, answer = server.send("POST", path, body)
    assert status == 200, answer
    if body.get("stream") is False:
        return answer
    assert headers["content-type"] == "application/x-ndjson"
    return lines(answer)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_and_its_stream_are_equal(any_hash_server, path):
    asked = {"messages": MESSAGES} if path == "/api/chat" else {"prompt": "Why?"}
    body = {"model": "hash", "options": SHORT, **asked}
    whole = ask(any_hash_server, path, **body, stream=False)
    *parts, last = ask(any_hash_server, path, **body)  # streams are the default
    assert [part["done"] for part in parts] == [False] * len(parts)

    def text(part):
        return part["message"]["content"] if path == "/api/chat" else part["response"]

    assert "".join(map(text, parts)) == text(whole) != ""
    assert text(last) == ""
    for end in (whole, last):
        assert (end["done"], end["done_reason"], end["eval_count"]) == (
            True, "length", 8,
        )  # fmt: skip
        assert end["prompt_eval_count"] > 8
        phases = ("load_duration", "prompt_eval_duration", "eval_duration")
        assert all(isinstance(end[name], int) and end[name] >= 0 for name in phases)
        assert sum(end[name] for name in phases) <= end["total_duration"]
        assert end["model"] == "hash"
    any_hash_server.wait_idle()


def test_the_requests_of_open_webui_are_answered(any_hash_server):
    *_, last = ask(any_hash_server, "/api/chat", **OPEN_WEBUI_CHAT)
    assert (last["model"], last["eval_count"]) == ("hash:latest", 8)
    version, tags, loaded = (
        any_hash_server.send("GET", path)[2] for path in OPEN_WEBUI_GETS
    )
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)
    for found in (tags, loaded):
        (row,) = found["models"]
        assert (row["name"], row["model"]) == ("hash:latest", "hash:latest")
        assert row["size"] > 1 << 20
        assert len(row["digest"]) == 64
        assert row["details"]["family"] == "llama"
        assert row["details"]["parameter_size"] == "134.5M"
    assert loaded["models"][0]["context_length"] == any_hash_server.engine.context
    any_hash_server.wait_idle()


def test_a_model_is_shown(any_hash_server):
    for name in ({"model": "hash"}, {"name": "hash:latest"}):
        found = any_hash_server.send("POST", "/api/show", name)[2]
        assert found["model_info"]["general.architecture"] == "llama"
        assert found["model_info"]["llama.embedding_length"] == 576
        assert found["capabilities"] == ["completion", "tools"]
        assert "messages" in found["template"]
    status, _, answer = any_hash_server.send("POST", "/api/show", {"model": "other"})
    assert (status, set(answer)) == (404, {"error"})


def test_what_an_answer_returns_as_context_comes_before_the_next(any_hash_server):
    body = {"model": "hash", "options": SHORT, "stream": False}
    first = ask(any_hash_server, "/api/generate", prompt="One", **body)
    alone = ask(any_hash_server, "/api/generate", prompt="Two", **body)
    context = first["context"]
    second = ask(
        any_hash_server, "/api/generate", prompt="Two", context=context, **body
    )
    assert second["context"][: len(context)] == context
    added = len(context) + alone["prompt_eval_count"]
    assert second["prompt_eval_count"] == added
    raw = ask(any_hash_server, "/api/generate", prompt="Two", raw=True, **body)
    assert raw["prompt_eval_count"] < alone["prompt_eval_count"]
    assert "context" not in raw


def test_calls_are_whole_and_their_arguments_objects():
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    exchange = OllamaChatExchange(body, "1", "m")
    answer, usage = Answer(), Usage()
    deltas = [
        Delta(content="Well."),
        Delta(calls=[CallDelta(0, id="a", name="look"), CallDelta(0, '{"at": {"x"')]),
        Delta(calls=[CallDelta(0, ": 1}}"), CallDelta(1, '{"cut', "b", "see")]),
        Delta(finish_reason="tool_calls"),
    ]
    text = b""
    for delta in deltas:
        answer.add(delta)
        text += exchange.delta(0, delta, lambda: usage)
    text += exchange.closing([answer], usage)
    first, calls, last = (part for part in lines(text))
    assert first["message"]["content"] == "Well."
    functions = [each["function"] for each in calls["message"]["tool_calls"]]
    assert [each["name"] for each in functions] == ["look", "see"]
    assert [each["arguments"] for each in functions] == [{"at": {"x": 1}}, {}]
    assert (calls["done"], last["done"], last["done_reason"]) == (False, True, "stop")
    whole = exchange.body([answer], usage)
    assert whole["message"] == {**calls["message"], "content": "Well."}


def test_a_format_is_a_grammar(any_hash_server):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    body = {"messages": MESSAGES, "format": schema, "stream": False}
    answer = ask(any_hash_server, "/api/chat", **body)
    assert json.loads(answer["message"]["content"]) == {"city": "Rome"}
    assert answer["done_reason"] == "stop"


def test_logprobs_are_of_each_token(any_hash_server):
    body = {"prompt": "a", "logprobs": True, "top_logprobs": 2, "options": SHORT}
    parts = ask(any_hash_server, "/api/generate", **body)
    scores = [each for part in parts for each in part.get("logprobs", ())]
    assert len(scores) == 8
    assert all(len(each["top_logprobs"]) == 2 for each in scores)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_prompt_loads_the_model(path):
    source = Source("one")
    with ModelServer(source, Source("two")) as server:
        assert server.send("GET", "/api/ps")[2] == {"models": []}
        (only,) = ask(server, path, model="one")
        assert (only["done"], only["done_reason"]) == (True, "load")
        (row,) = server.send("GET", "/api/ps")[2]["models"]
        assert row["name"] == "one:latest"
        names = [row["name"] for row in server.send("GET", "/api/tags")[2]["models"]]
        assert names == ["one:latest", "two:latest"]
        body = {"model": "one", "keep_alive": 0}
        status, _, answer = server.send("POST", path, body)
        assert (status, answer["error"][:11]) == (400, "keep_alive:")


def test_vectors_are_those_of_the_other_dialect(server_url_of):
    texts = ["a sky", "a sea"]
    wanted = server_url_of("/v1/embeddings", input=texts)["data"]
    found = server_url_of("/api/embed", model="default:latest", input=texts)
    assert found["embeddings"] == [each["embedding"] for each in wanted]
    assert found["prompt_eval_count"] > 0
    one = server_url_of("/api/embeddings", model="default", prompt="a sea")
    assert one["embedding"] == pytest.approx(wanted[1]["embedding"], abs=1e-5)
    long = "sky " * 5000
    cut = server_url_of("/api/embed", input=long, truncate=True)
    assert cut["prompt_eval_count"] == 2048
    many = server_url_of("/api/embed", input=["a"] * 2049)
    assert "found 2049 texts" in many["error"], "as of /v1/embeddings"
    refused = server_url_of("/api/embed", input=long, truncate=False)
    assert "2048" in refused["error"]


@pytest.fixture
def server_url_of(server_url):
    """Post a body to the server of the default model, and return the answer."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    def post(path, **body):
        request = Request(server_url + path, json.dumps(body).encode())
        try:
            with urlopen(request, timeout=300) as response:
                return json.loads(response.read())
        except HTTPError as error:
            return json.loads(error.read())

    return post


REFUSED = {
    "messages[0].images[0]": {"messages": [{"role": "user", "images": ["%"]}]},
    "messages[0].images": {"messages": [{"role": "assistant", "images": ["aGk="]}]},
    "options.mirostat": {"messages": MESSAGES, "options": {"mirostat": 1}},
    "options.foo": {"messages": MESSAGES, "options": {"foo": 1}},
    "keep_alive": {"messages": MESSAGES, "keep_alive": "soon"},
    "template": {"messages": MESSAGES, "template": "{{ .Prompt }}"},
    "model": {"messages": MESSAGES, "model": "other"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(any_hash_server, name):
    status, _, answer = any_hash_server.send("POST", "/api/chat", REFUSED[name])
    assert status == (404 if name == "model" else 400)
    assert set(answer) == {"error"}
    assert answer["error"].startswith(f"{name}: "), answer


def test_other_paths_and_the_root_answer_as_ollama(any_hash_server):
    status, _, answer = any_hash_server.send("POST", "/api/create", {"model": "a"})
    assert (status, set(answer)) == (404, {"error"})
    anything = {"accept": "*/*"}
    status, _, text = any_hash_server.send("GET", "/", None, anything)
    assert (status, text) == (200, b"Ollama is running")
    page = any_hash_server.send("GET", "/", None, {"accept": "text/html,*/*"})
    assert page[2].startswith(b"<!doctype html>")
    for path in ("/", "/api/tags", "/api/version"):
        with any_hash_server.connection() as connection:
            connection.request("HEAD", path, None, anything)
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"")


def test_idle_streams_get_empty_parts():
    body = json.dumps({"messages": MESSAGES, "options": {"num_predict": 2}}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}"

    async def run(server):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with server.paused():
            writer.write(f"{head}\r\n\r\n".encode() + body)
            text = b""
            while text.count(b'"content":""') < 3:
                part = await asyncio.wait_for(reader.read(4096), 300)
                assert part, text
                text += part
        writer.close()

    with HashServer(max_batch=1, keep_alive_seconds=0.2) as server:
        asyncio.run(run(server))
        server.wait_idle()


def test_results_get_the_ids_of_their_calls():
    calls = [{"function": {"name": name}} for name in "fg"]
    given = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "0"},
    ]
    made = template_messages(msgspec.convert(given, list[OllamaMessage]))
    first, second = (call["id"] for call in made[0]["tool_calls"])
    assert len({first, second}) == 2
    assert [each["tool_call_id"] for each in made[1:]] == [second, first, ""]
    assert [each["name"] for each in made[1:]] == ["g", "f", ""]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("0", 0), (7, 7), ("-1", -1),
     ("-1m", -60), ("0s", 0), (None, None)],
)  # fmt: skip
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


def test_a_name_with_the_tag_of_none_is_refused():
    with pytest.raises(RequestError, match="accepts 'a'"):
        ModelServer(Source("a:latest")).make()


@pytest.fixture(params=[0, 2])
def admin_server(request):
    keys = {"admin_keys": ("operator",), "frontends": request.param}
    with HashServer(max_batch=1, **keys) as server:
        yield server


def test_models_are_pulled_and_deleted_by_operators(admin_server, monkeypatch):
    removed = []

    def pull(name, report):
        if name == "lost":
            raise CheckpointError("lost: is lost")
        report(3, 8)
        report(8, 8)
        return f"/models/{name}"

    def remove(name):
        if name == "lost":
            raise CheckpointError("lost: is not in a cache")
        removed.append(name)

    monkeypatch.setattr(store, "pull_model", pull)
    monkeypatch.setattr(store, "remove_model", remove)

    def send(method, path, body, headers=KEY):
        return admin_server.send(method, path, body, headers)

    assert send("POST", "/api/pull", {"model": "a"}, {})[0] == 401
    assert send("DELETE", "/api/delete", {"model": "a"}, {})[0] == 401
    statuses = lines(send("POST", "/api/pull", {"model": "a:1b"})[2])
    assert [each["status"] for each in statuses] == [
        "pulling manifest", "pulling a:1b", "pulling a:1b",
        "stored; serve it with: inl serve a:1b", "success",
    ]  # fmt: skip
    assert [each.get("completed") for each in statuses[1:3]] == [3, 8]
    whole = send("POST", "/api/pull", {"model": "a", "stream": False})[2]
    assert whole == {"status": "success"}
    assert lines(send("POST", "/api/pull", {"name": "lost"})[2])[-1] == {
        "error": "lost: is lost"
    }
    assert lines(send("POST", "/api/pull", {"name": "hash:latest"})[2]) == [
        {"status": "success"}
    ]
    assert send("DELETE", "/api/delete", {"model": "a"})[0] == 200
    status, _, answer = send("DELETE", "/api/delete", {"model": "lost"})
    assert (status, answer) == (404, {"error": "lost: is not in a cache"})
    status, _, answer = send("DELETE", "/api/delete", {"name": "hash"})
    assert (status, "is served" in answer["error"]) == (409, True)
    assert removed == ["a"]


def test_without_admin_keys_files_do_not_change(any_hash_server):
    for method, path, command in (
        ("POST", "/api/pull", "inl pull"), ("DELETE", "/api/delete", "inl rm")
    ):  # fmt: skip
        status, _, answer = any_hash_server.send(method, path, {"model": "a"})
        assert status == 403
        assert command in answer["error"]


def test_a_failure_behind_front_ends_is_answered(admin_server, monkeypatch):
    """An endpoint that fails has answered, though Starlette raises its error again."""

    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(store, "remove_model", fail)
    body = {"model": "a"}
    status, _, answer = admin_server.send("DELETE", "/api/delete", body, KEY)
    assert (status, answer["error"][:14]) == (500, "internal error")


def test_files_that_are_not_there_have_an_empty_card(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert (
        read_card(str(tmp_path)) == read_card("/nowhere") == stored_models.ModelCard()
    )
