"""Log-probabilities of prompts on every backend, and with all that engines add."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl import EngineConfig, InferenceEngine
from inl.device import Device
from inl.executor.model_loader import open_model
from inl.runners.local_runner import start_runner
from inl.testing.tiny import plain_logits, tiny_llama
from inl_cpu.torch_backend import TorchCpuBackend
from lora_files import LoraFiles
from rank_engines import over
from simulated_graphs import simulated  # noqa: F401

CONTEXT = 512
PROMPTS = [
    [int(each) for each in np.random.default_rng(9).integers(0, 96, count)]
    for count in (2, 37, 150, 300)
]
"""Of one token to score, and of more than a part of the head's product."""


@pytest.fixture(scope="module", params=[2, 1], ids=["2 layers", "1 layer"])
def made(request, tmp_path_factory):
    """Config and tensors of a model, and its folder."""
    config, tensors = tiny_llama(np.random.default_rng(5), layers=request.param)
    config["max_position_embeddings"] = CONTEXT
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors, folder


def config_of(**settings):
    settings = {"dtype": "float32", "context": CONTEXT, "max_batch": 4} | settings
    return EngineConfig(**{"backend": "reference", "token_budget": 256} | settings)


def opened(folder, **settings):
    return InferenceEngine(open_model(folder), config=config_of(**settings))


def on(folder, backend, **settings):
    """An engine on a backend that is no plugin's."""
    model, config = open_model(folder), config_of(**settings)
    return InferenceEngine(
        model, config=config, runner=start_runner(model, backend, config)
    )


def check(engine, config, tensors, **options):
    """Compare with float64: all tokens, and from one on, which may be cached."""
    wanted = []
    for prompt in PROMPTS:
        rows = plain_logits(config, tensors, prompt)[:-1]
        rows = rows - rows.max(-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        wanted.append(rows)
    for tokens, share in ((0, 0), (3, 0), (0, 0.7)):
        firsts = [max(int(share * len(prompt)), 1) for prompt in PROMPTS]
        handles = [
            engine.submit(
                prompt, prompt_logprobs=2, prompt_logprobs_start=first,
                max_tokens=tokens, ignore_eos=tokens > 0, **options,
            )
            for prompt, first in zip(PROMPTS, firsts, strict=True)
        ]  # fmt: skip
        for prompt, first, rows, handle in zip(
            PROMPTS, firsts, wanted, handles, strict=True
        ):
            result = handle.result()
            assert len(result.token_ids) == tokens
            assert result.prompt_logprobs[:first] == (None,) * first
            scores = result.prompt_logprobs[first:]
            assert [each.token for each in scores] == prompt[first:]
            rows = rows[first - 1 :]
            exact = rows[np.arange(len(scores)), prompt[first:]]
            values = np.array([each.logprob for each in scores])
            assert np.abs(values - exact).max() < 2e-4
            for row, each in zip(rows, scores, strict=True):
                assert len(each.top) == 2
                for token, value in each.top:
                    assert abs(row[token] - value) < 2e-4


BACKENDS = {
    "reference": ("reference", {}),
    "native": ("cpu", {}),
    "jax": ("tpu", {"INL_TPU_PLATFORM": "cpu"}),
    "onnx": ("directml", {"INL_DIRECTML_PROVIDER": "cpu"}),
    "worker": (f"worker:{sys.executable}/cpu", {}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name == "jax" else name
     for name in BACKENDS],
)  # fmt: skip
def test_scores_are_those_of_float64(made, name, monkeypatch):
    config, tensors, folder = made
    backend, variables = BACKENDS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with opened(folder, backend=backend) as engine:
        check(engine, config, tensors)


def test_scores_of_eager_torch_are_those_of_float64(made):
    config, tensors, folder = made
    with on(folder, TorchCpuBackend(Device("cpu"))) as engine:
        check(engine, config, tensors)


def test_scores_of_captured_graphs_are_those_of_float64(made, simulated):  # noqa: F811
    config, tensors, folder = made
    backend, graphs = simulated
    with on(folder, backend) as engine:
        check(engine, config, tensors)
    assert sum(graph.replays for graph in graphs) > len(graphs) > 1


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scores_beside_drafts_are_those_of_float64(made, backend):
    config, tensors, folder = made
    with opened(folder, backend=backend, speculation="ngram", max_drafts=3) as engine:
        check(engine, config, tensors)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scores_with_an_adapter_are_those_of_its_merged_weights(
    made, backend, tmp_path
):
    config, tensors, folder = made
    files = LoraFiles(tensors, seed=1)
    files.write(tmp_path / "one")
    settings = {"max_adapters": 2, "max_adapter_rank": 4, "backend": backend}
    with opened(folder, **settings) as engine:
        engine.load_adapter("one", tmp_path / "one")
        check(engine, config, tensors)
        check(engine, config, files.merged(tensors), adapter="one")


def test_scores_of_two_ranks_are_those_of_float64(made):
    config, tensors, folder = made
    with over(open_model(folder), 2, config_of()) as engine:
        check(engine, config, tensors)
