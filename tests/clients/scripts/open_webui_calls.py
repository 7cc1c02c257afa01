# /// script
# dependencies = []
# ///
"""What Open WebUI sends, recorded by hand: to an Ollama and to an OpenAI connection."""

import json
from urllib.request import Request, urlopen

from cases import MODEL, QUESTION, URL, run

NAME = f"{MODEL}:latest"
MESSAGES = [
    {"role": "system", "content": "Answer shortly."},
    {"role": "user", "content": QUESTION},
]


def send(path, body=None):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data, headers), timeout=300) as response:
        return response.read().decode()


def connection():
    """What it asks when a connection is saved, and for its list of models."""
    assert json.loads(send("/api/version"))["version"]
    (model,) = json.loads(send("/api/tags"))["models"]
    assert model["model"] == NAME
    assert {"size", "digest", "modified_at", "details"} <= model.keys()
    assert "models" in json.loads(send("/api/ps"))
    assert json.loads(send("/api/show", {"name": NAME, "model": NAME}))["model_info"]
    assert json.loads(send("/v1/models"))["data"]


def ollama_chat():
    options = {
        "temperature": 0, "top_k": 40, "top_p": 0.9, "num_ctx": 2048, "num_predict": 24,
        "repeat_last_n": 64, "repeat_penalty": 1.0, "mirostat": 0, "seed": 5,
        "stop": ["never"], "num_gpu": 99, "use_mmap": True,
    }  # fmt: skip
    body = {"model": NAME, "messages": MESSAGES, "options": options, "stream": True}
    lines = send("/api/chat", body | {"keep_alive": "5m"}).splitlines()
    *parts, last = map(json.loads, lines)
    assert "".join(part["message"]["content"] for part in parts)
    assert last["done"]
    assert last["eval_count"] > 0


def ollama_title():
    """A title for the conversation, without a stream."""
    body = {"model": NAME, "messages": MESSAGES[1:], "stream": False}
    answer = json.loads(send("/api/chat", body | {"options": {"num_predict": 24}}))
    assert answer["message"]["content"]


def openai_chat():
    body = {
        "model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 24,
        "stream_options": {"include_usage": True}, "temperature": 0,
    }  # fmt: skip
    events = send("/v1/chat/completions", body).split("\n\n")
    assert events[-2] == "data: [DONE]"
    parts = [json.loads(event[6:]) for event in events[:-2]]
    deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas)
    assert parts[-1]["usage"]["completion_tokens"] > 0


def documents():
    """Embeddings of a document's parts, by both connections."""
    texts = ["A part.", "Another part."]
    found = json.loads(send("/api/embed", {"model": NAME, "input": texts}))
    assert len(found["embeddings"]) == 2
    found = json.loads(send("/v1/embeddings", {"model": MODEL, "input": texts}))
    assert len(found["data"]) == 2


run(connection, ollama_chat, ollama_title, openai_chat, documents)
