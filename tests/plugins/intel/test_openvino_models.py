"""Models on OpenVINO's CPU device: the oracle, families, batches, refusals."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from depth import scaled
from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model
from inl.device import Device
from inl.errors import NoKernel, RequestError
from inl.executor.model_loader import open_model
from inl.runners.local_runner import start_runner
from inl.testing.near_tie import compare
from inl.testing.oracle import prompt_logits
from inl_intel.openvino.backend import OpenVinoBackend

DEVICE = Device("xpu:0")
ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"
TOKENS = scaled(12, 64)
SERVED = scaled(
    ("mistral", "qwen3", "gemma3"),
    (
        "llama3", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen2-window",
        "qwen3", "qwen3-window", "gemma3", "phi3", "phi3-long", "olmo2", "olmo3",
        "smollm3", "granite", "glm", "glm4", "llama-bias-gelu", "cohere", "cohere2",
        "starcoder2",
    ),
)  # fmt: skip
REFUSED = {
    "gemma2": (NoKernel, "paged attention has no soft cap of the scores"),
    "gpt-oss": (NoKernel, "no kernel for sink_attention"),
    "deepseek2": (NoKernel, "no kernel for head_linear"),
    "qwen3.5": (RequestError, r"keeps 'conv\.0' for each sequence"),
}


@pytest.fixture(scope="module")
def cases():
    return json.loads(ORACLE.read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def engine():
    language = open_model(default_model())
    config = EngineConfig(max_batch=9, context=256)
    runner = start_runner(language, OpenVinoBackend(DEVICE, name="CPU"), config)
    with InferenceEngine(language, config=config, runner=runner) as engine:
        yield engine


def test_the_default_model_follows_the_oracle(engine, cases, capsys):
    """Nine answers in one batch, then one alone, whose tokens are the same."""
    answers = engine.generate([c["prompt_ids"] for c in cases], max_tokens=TOKENS)
    alone = engine.generate(cases[1]["prompt_ids"], max_tokens=TOKENS)
    compared = [
        compare(answer.token_ids, case["token_ids"][:TOKENS], case["margins"])
        for answer, case in zip(answers, cases, strict=True)
    ]
    with capsys.disabled():
        print(f"\n{len([c for c in compared if c.gap])} of 9 leave the oracle")
    assert all(each.allowed("float32") for each in compared)
    expected = list(answers[1].token_ids)
    assert compare(alone.token_ids, expected, cases[1]["margins"]).allowed("float32")


def test_the_first_logits_are_the_oracles(engine, cases):
    for case in cases[: scaled(3, 9)]:
        logits = prompt_logits(engine.runner, case["prompt_ids"])
        top = np.argsort(-logits)[:10]
        assert list(top) == case["top10_ids"]
        assert np.abs(logits[top] - case["top10_logits"]).max() <= 1e-3


@pytest.mark.full
def test_drafts_do_not_change_an_answer(engine, cases):
    """A step that verifies drafts samples every token of its rows."""
    language = open_model(default_model())
    config = EngineConfig(max_batch=1, context=256, speculation="ngram")
    runner = start_runner(language, OpenVinoBackend(DEVICE, name="CPU"), config)
    prompt = cases[0]["prompt_ids"] * 3
    plain = engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True)
    with InferenceEngine(language, config=config, runner=runner) as drafted:
        found = drafted.generate(prompt, max_tokens=TOKENS, ignore_eos=True)
    assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("name", SERVED)
def test_logits_of_families_are_those_of_transformers(name, tmp_path):
    families = importlib.import_module("families")
    made = families.make(name, tmp_path)
    backend = OpenVinoBackend(DEVICE, name="CPU")
    runner = families.opened(made, backend, block_size=32)
    for cuts in ((), (9, *range(10, families.TOKENS)), (6, 7, 8), (20, 39)):
        found = families.logits(runner, made.ids, cuts)
        assert families.distance(found, made.logits) < 1e-4, cuts


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.full
def test_other_families_are_refused_by_name(name, tmp_path):
    families = importlib.import_module("families")
    error, text = REFUSED[name]
    made = families.make(name, tmp_path)
    with pytest.raises(error, match=text):
        families.opened(made, OpenVinoBackend(DEVICE, name="CPU"), block_size=32)
