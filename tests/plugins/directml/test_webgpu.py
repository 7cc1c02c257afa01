"""Programs on the WebGPU provider, where a Vulkan driver is found: software will do.

``make test-webgpu`` brings one, and names it by ``VK_ICD_FILENAMES``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend
from inl.checkpoints.hub.resolve import default_model
from inl.device import Device
from inl.errors import BackendUnavailable
from inl.executor.model_loader import open_model
from inl.models.llama import MODEL
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play
from inl_directml import probe
from inl_directml.backend import DirectmlBackend

LIMITS = Limits(
    slots=4,
    blocks=(41,),
    block_size=4,
    max_blocks_per_seq=12,
    vocab=96,
    sampler="greedy",
)
DRIVER = "VK_ICD_FILENAMES"
ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"
RECORD = "session.record_ep_graph_assignment_info"
ON_CPU = {
    "BitwiseAnd", "Cast", "Concat", "IsInf", "IsNaN", "Mod", "Round", "Slice"
}  # fmt: skip
"""Operators that may run on the CPU: of indices in int64, and of one row's sampling."""


@pytest.fixture(scope="module")
def webgpu_backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INL_DIRECTML_PROVIDER", "webgpu")
        patch.setenv("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
        try:
            probe.probe()
            return DirectmlBackend(Device("directml:0"))
        except BackendUnavailable as error:
            if DRIVER in os.environ:
                raise
            pytest.skip(str(error))


@pytest.mark.parametrize("seed", [4, 5])
def test_tokens_equal_the_float64_reference(webgpu_backend, seed):
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(seed), layers=2))
    runner = local_runner(webgpu_backend, MODEL, files, LIMITS)
    exact = ReferenceBackend(Device("reference:0"), dtype="float64")
    reference = local_runner(exact, MODEL, files, LIMITS, dtype="float64")

    def texts(which):
        rng = np.random.default_rng(seed)
        return play(which, Traffic(rng, runner.limits, sampler="greedy").frames(20))

    found = texts(runner)
    assert sum(map(len, found.values())) > 10
    assert found == texts(reference)


@pytest.fixture
def sessions(webgpu_backend, monkeypatch):
    """The sessions that are opened, each with a record of where its nodes run."""
    runtime = webgpu_backend.runtime
    provider, opened = runtime.provider, []

    def configure(options):
        options.add_session_config_entry(RECORD, "1")
        return provider.configure(options)

    def session(*args):
        opened.append(type(runtime).session(runtime, *args))
        return opened[-1]

    monkeypatch.setattr(runtime, "provider", provider._replace(configure=configure))
    monkeypatch.setattr(runtime, "session", session)
    return opened


def operators(session, provider):
    """Return the operators of the nodes of a session that a provider runs."""
    return [
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == provider
        for node in part.get_nodes()
    ]


@pytest.mark.full
def test_the_default_model_follows_the_oracle(webgpu_backend, sessions):
    """Logits of two prompts, then answers; the layers run on the provider."""
    language = open_model(default_model())
    config = EngineConfig(dtype="float32", max_batch=2, context=64, sampling="greedy")
    runner = start_runner(language, webgpu_backend, config)
    cases = [json.loads(ORACLE.read_text("utf-8"))["cases"][at] for at in (0, 2)]
    for case in cases:
        logits = prompt_logits(runner, case["prompt_ids"])
        top = np.argsort(-logits)[:10]
        assert list(top) == case["top10_ids"]
        assert np.abs(logits[top] - case["top10_logits"]).max() <= 1e-3
        runner.reset()
    with InferenceEngine(language, config=config, runner=runner) as engine:
        for case in cases:
            answer = engine.generate(case["prompt_ids"], max_tokens=4)
            assert list(answer.token_ids) == case["token_ids"][:4]
    assert max(len(operators(s, "WebGpuExecutionProvider")) for s in sessions) > 1000
    for each in sessions:
        rest = operators(each, "CPUExecutionProvider")
        assert set(rest) <= ON_CPU
        assert len(rest) < 50
