"""``/infill`` and ``suffix``: the engine's answer to the prompt of the family."""

from __future__ import annotations

import json

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from byte_tokens import byte_rules
from http_servers import HashServer, ServerProcess, hash_engine
from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.executor.model_loader import open_model
from inl.serve.server import engine_config
from inl.testing.tiny import tiny_llama
from inl.text.fill_in_middle import fill_ids

NAMES = {"prefix": "<issue_start>", "suffix": "<issue_comment>"}
NAMES |= {"middle": "<issue_closed>", "file": "<file_sep>"}
"""Tokens of the default model that stand for those of a model of code."""

BEFORE, AFTER = "def f(a):\n    return ", "\n\nprint(f(1))"
GAP = {"input_prefix": BEFORE, "input_suffix": AFTER, "temperature": 0}
GAP |= {"n_predict": 8}


def answer(url, path, body):
    found = httpx.post(f"{url}{path}", json=body, timeout=300)
    assert found.status_code == 200, found.text
    return found.json()


def refusal(url, path, body):
    found = httpx.post(f"{url}{path}", json=body, timeout=300)
    return found.status_code, found.json()["error"]


def code_tokenizer():
    tokenizer = open_model(resolve_model(None)).checkpoint.tokenizer()
    ids = {name: tokenizer.token_id(text) for name, text in NAMES.items()}
    tokenizer.fill_ids = ids
    return tokenizer


class CodeServer(HashServer):
    """A server of hashes whose vocabulary has fill-in-the-middle tokens."""

    def _open(self, on_step):
        config = engine_config(EngineConfig(), self.config, 4)
        self.engine = hash_engine(
            4, config=config, on_step=on_step, tokenizer=code_tokenizer()
        )
        return self.engine


@pytest.fixture(scope="module")
def server():
    with CodeServer(max_batch=4) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """The engine's own text and tokens after the prompt of a gap."""

    def continued(before=BEFORE, after=AFTER, files=(), tokens=8, **options):
        tokenizer = server.engine.tokenizer
        ids = fill_ids(tokenizer, before, after, files, context=1024)
        ends = [tokenizer.token_id(text) for text in NAMES.values()]
        return server.engine.generate(
            ids, max_tokens=tokens, stop_ids=ends, temperature=0, **options
        )

    return continued


def test_a_gap_is_filled(server, expected):
    body = answer(server.url, "/infill", GAP)
    assert body["content"] == expected().text
    assert body["tokens_predicted"] == 8
    assert body["stop_type"] == "limit"
    assert body["stop"] is True


def test_the_prompt_continues_the_prefix_and_files_precede_it(server, expected):
    extra = [{"filename": "a.py", "text": "x = 1"}, {"text": "y"}]
    body = answer(server.url, "/infill", {**GAP, "prompt": "a +", "input_extra": extra})
    files = [("a.py", "x = 1"), ("tmp", "y")]
    assert body["content"] == expected(BEFORE + "a +", files=files).text


def test_a_stream_has_the_same_text(server, expected):
    found = httpx.post(
        f"{server.url}/infill", json={**GAP, "stream": True}, timeout=300
    )
    lines = [line[6:] for line in found.content.split(b"\n\n") if line]
    parts = [json.loads(line) for line in lines]
    assert "".join(part["content"] for part in parts) == expected().text
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_the_fields_of_an_editor_are_accepted_and_chosen_ones_returned(server):
    """As llama.vim and llama.vscode send them."""
    names = ["content", "timings/prompt_n", "timings/predicted_ms", "tokens_cached"]
    body = answer(server.url, "/infill", {
        **GAP, "input_extra": [], "prompt": "", "n_indent": 4, "top_k": 40,
        "id_slot": 0,
        "top_p": 0.9, "stream": False, "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": [*names, "none/of/these"], "stop": [], "lora": [],
    })  # fmt: skip
    assert sorted(body) == sorted(names)


def test_no_token_is_generated_where_an_editor_only_fills_the_cache(server):
    body = answer(server.url, "/infill", {**GAP, "n_predict": 0, "samplers": []})
    assert (body["content"], body["tokens_predicted"]) == ("", 0)


def test_the_middle_ends_at_a_token_of_the_gap(server):
    """Of which each is forced to be the only one allowed."""
    tokenizer = server.engine.tokenizer
    for text in NAMES.values():
        body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 8}
        body |= {"allowed_token_ids": [tokenizer.token_id(text)]}
        (choice,) = answer(server.url, "/v1/completions", body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_the_openai_client_completes_before_a_suffix(server, expected):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        found = client.completions.create(
            model="hash", prompt=BEFORE, suffix=AFTER, max_tokens=8, temperature=0
        )
    assert found.choices[0].text == expected().text


def test_ollamas_suffix_is_the_same(server, expected):
    body = {"prompt": BEFORE, "suffix": AFTER, "stream": False}
    body |= {"options": {"temperature": 0, "num_predict": 8}}
    assert answer(server.url, "/api/generate", body)["response"] == expected().text


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"echo": True}, "echo"), ({"prompt": [1, 2]}, "suffix"),
     ({"prompt": ["a", [1]]}, "prompt")],
)  # fmt: skip
def test_what_a_suffix_has_no_meaning_with_is_refused(server, fields, name):
    body = {"prompt": BEFORE, "suffix": AFTER, **fields}
    status, error = refusal(server.url, "/v1/completions", body)
    assert (status, error["param"]) == (400, name)


@pytest.mark.parametrize("path", ["/infill", "/v1/completions"])
def test_a_model_without_such_tokens_is_refused_by_name(hash_server, path):
    body = GAP if path == "/infill" else {"prompt": BEFORE, "suffix": AFTER}
    status, error = refusal(hash_server.url, path, body)
    assert (status, error["param"]) == (400, "suffix")
    assert "has no fill-in-the-middle tokens" in error["message"]


@pytest.fixture
def code_folder(tmp_path):
    """A tiny Llama over bytes with StarCoder's tokens."""
    config, tensors = tiny_llama(np.random.default_rng(11), vocab=259, kv_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    rules = byte_rules()
    rules.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    rules.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.full
def test_front_ends_encode_a_gap_too(code_folder):
    found = []
    for count in ("0", "1"):
        with ServerProcess(str(code_folder), "--frontends", count) as server:
            found.append(answer(server.url, "/infill", GAP)["content"])
    assert found[0] == found[1]
