"""Speculation over HTTP: the same tokens, and counts of drafts under vLLM's names."""

from __future__ import annotations

import re

import openai
import pytest

from http_servers import ServerProcess

pytestmark = pytest.mark.full

DRAFTS = 4
LINES = "Repeat exactly: red, green, blue, red, green, blue, red, green, blue, red,"
OPTIONS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "stopped": {"temperature": 0, "stop": ["blue, red"]},
    "several": {"temperature": 1, "seed": 5, "n": 3},
}


@pytest.fixture(scope="module")
def speculating():
    options = ["--speculation", "ngram", "--max-drafts", str(DRAFTS)]
    with ServerProcess(*options, "--no-adaptive-drafts") as server:
        yield server.url


def texts(url, **options):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        done = client.completions.create(
            model="default", prompt=LINES, max_tokens=32, **options
        )
    return [(each.text, each.finish_reason) for each in done.choices]


def streamed(url, **options):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        parts = client.completions.create(
            model="default", prompt=LINES, max_tokens=32, stream=True, **options
        )
        return "".join(part.choices[0].text for part in parts)


def counts(url):
    """Return the counters of drafts by name, and those of each position."""
    with openai.OpenAI(base_url=url, api_key="none") as client:
        text = client.get("/metrics", cast_to=str)
    found = re.findall(r"^vllm:spec_decode_(\w+)_total\{(.*)\} (\S+)$", text, re.M)
    plain, positions = {}, {}
    for name, labels, value in found:
        assert 'model_name="default"' in labels
        if name == "num_accepted_tokens_per_pos":
            positions[int(re.search(r'position="(\d+)"', labels)[1])] = float(value)
        else:
            plain[name] = float(value)
    return plain, positions


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_without_speculation(server_url, speculating, name):
    options = OPTIONS[name]
    wanted = texts(server_url, **options)
    assert texts(speculating, **options) == wanted
    if name != "several":
        assert streamed(speculating, **options) == wanted[0][0]


def test_metrics_have_the_counts_of_drafts(server_url, speculating):
    texts(speculating, temperature=0)
    plain, positions = counts(speculating)
    assert plain["num_drafts"] > 0
    assert plain["num_drafts"] <= plain["num_draft_tokens"]
    assert plain["num_draft_tokens"] <= DRAFTS * plain["num_drafts"]
    assert 0 < plain["num_accepted_tokens"] <= plain["num_draft_tokens"]
    assert sorted(positions) == list(range(DRAFTS))
    assert sum(positions.values()) == plain["num_accepted_tokens"]
    falling = [positions[at] for at in range(DRAFTS)]
    assert falling == sorted(falling, reverse=True)
    assert counts(server_url) == ({}, {})
