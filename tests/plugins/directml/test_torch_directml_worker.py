"""The torch route as it is used: an engine with its runner in another environment.

``INL_TEST_TORCH_DIRECTML`` names that environment's Python, by default this one: `make
test-torch-directml` takes one with torch 2.4.1. torch's CPU takes the adapter's place.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model
from inl.errors import BackendUnavailable, RunnerError
from inl.executor.model_loader import open_model
from inl.testing.near_tie import compare

PLACE = "INL_TEST_TORCH_DIRECTML"
SIMULATED = str(Path(__file__).with_name("simulated"))
ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"
DEVICE = f"worker:{os.environ.get(PLACE, sys.executable)}/directml:0"
CONFIG = EngineConfig(backend=DEVICE, dtype="float32", max_batch=3, context=96)
TOKENS = 4

if PLACE not in os.environ and find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("INL_PLUGINS", "inl_directml.plugin")
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", "torch")


@pytest.fixture
def simulated(monkeypatch):
    """Workers find a WSL and torch-directml, both simulated."""
    paths = (SIMULATED, os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.long
def test_the_default_model_follows_the_oracle(simulated):
    """One greedy answer alone, then two in a batch, and one with every filter."""
    cases = json.loads(ORACLE.read_text("utf-8"))["cases"][:2]
    prompts = [case["prompt_ids"] for case in cases]
    with InferenceEngine(open_model(default_model()), config=CONFIG) as engine:
        alone = engine.generate(prompts[0], max_tokens=TOKENS)
        batch = engine.generate(prompts, max_tokens=TOKENS)
        filtered = engine.generate(
            prompts[0], max_tokens=TOKENS, temperature=1.0, top_k=5, top_p=0.9,
            repetition_penalty=1.2, seed=1,
        )  # fmt: skip
    for answer, case in zip([alone, *batch], [cases[0], *cases], strict=True):
        found = compare(answer.token_ids, case["token_ids"][:TOKENS], case["margins"])
        assert found.allowed("float32")
    assert len(filtered.token_ids) == TOKENS


@pytest.mark.full
def test_an_operator_that_the_device_lacks_is_not_computed(simulated, monkeypatch):
    monkeypatch.setenv("INL_TEST_NO_DETOUR", "1")
    with (
        pytest.raises(RunnerError, match="has no kernel for index_copy_ and would"),
        InferenceEngine(open_model(default_model()), config=CONFIG) as engine,
    ):
        engine.generate([1, 2, 3], max_tokens=2)


def test_a_machine_without_an_adapter_is_refused():
    with pytest.raises(BackendUnavailable, match="no DirectX 12: it is part"):
        InferenceEngine(open_model(default_model()), config=CONFIG)
