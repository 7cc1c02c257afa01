"""Request fields beyond those of OpenAI's API, against the engine's own options."""

from __future__ import annotations

import pytest

from http_servers import hash_engine

PATH = "/v1/completions"
PROMPT = list(range(100, 500))


@pytest.fixture(scope="module")
def twin():
    with hash_engine(4) as engine:
        yield engine


def complete(server, status=200, path=PATH, **body):
    found, _, answer = server.send("POST", path, {"max_tokens": 4, **body})
    assert found == status, answer
    return answer


def test_completions_of_one_prompt_share_its_blocks(hash_server):
    before = hash_server.engine.stats.tokens
    answer = complete(hash_server, prompt=PROMPT, n=4, seed=1)
    assert len(answer["choices"]) == 4
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert hash_server.engine.stats.tokens - before < 1.2 * len(PROMPT)
    hash_server.wait_idle()
