"""Answers of a tiny mixture of experts on an engine core, in every kind of request."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from inl.adapters.registry import check_adapter
from inl.engine.core import EngineCore
from inl.executor.model_loader import LanguageModel
from inl.models import mixtral
from inl.protocol.runner import AdapterSource
from inl.scheduling.scheduler import Scheduler
from inl.speculation.drafters import NgramDrafter
from inl.speculation.planner import Speculation
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_mixture
from lora_files import LoraFiles
from rank_engines import runner_over
from served_requests import served as served_by
from toy_guide import ToyGrammar

PROMPTS = [[5, 17, 80, 3, 44, 9], [61], [7, 7, 12] * 6]
COUNT = 12
SAMPLED = {"temperature": 1.3, "seed": 7}
OPTIONS = {
    "context": 64, "depth": 2, "max_batch": 3, "token_budget": 16, "max_drafts": 3,
    "speculation": "ngram", "max_adapters": 1, "max_adapter_rank": 4,
}  # fmt: skip
"""Of the engine's config."""
ATTENTION = ("q", "k", "v", "o")
"""Layers of the adapter."""


def made(**sizes):
    """Config and tensors of a mixture of eight experts."""
    sizes = {"experts": 8, "kv_heads": 4, "inner": 32, **sizes}
    return tiny_mixture(np.random.default_rng(21), **sizes)


def write(folder, config, tensors):
    """Write the model, and an adapter of its attention beside it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    adapter = LoraFiles(tensors, seed=3, targets=ATTENTION)
    adapter.write(folder.with_name(f"{folder.name}-adapter"))
    return folder


def exact(config, tensors, request):
    """The most probable token in float64 after each prefix of an answer."""
    logits = plain_logits(config, tensors, request.tokens[:-1])
    return list(logits[-len(request.output_ids) :].argmax(-1))


def served(runner, *, grammar=None, drafts=False, adapter=None, **options):
    """Requests that have been answered, and how many drafts were verified."""
    limits = runner.limits
    speculation = Speculation(NgramDrafter(), 3) if drafts else None
    scheduler = Scheduler(limits, speculation=speculation)
    core = EngineCore(runner, scheduler=scheduler)
    if adapter is not None:
        core.load_adapter(adapter)
        options |= {"adapter": adapter.number, "adapter_digest": adapter.digest}
    requests = served_by(core, PROMPTS, COUNT, grammar, **options)
    return requests, speculation.drafted if speculation else 0


def answers(runner, language=None):
    """Token ids by kind of request.

    language: whose adapter is loaded, where the runner has room for one.
    """
    grammar = ToyGrammar(3, 96, {95}, counts=(2, 9))
    kinds = {
        "greedy": {}, "sampled": SAMPLED, "structured": {"grammar": grammar, **SAMPLED},
        "drafts": {"drafts": True}, "sampled drafts": {"drafts": True, **SAMPLED},
    }  # fmt: skip
    found = {}
    for kind, options in kinds.items():
        requests, drafted = served(runner, **options)
        assert not drafted or "drafts" in kind
        assert drafted or "drafts" not in kind or runner.limits.stages > 1
        found[kind] = [request.output_ids for request in requests]
    if language is not None:
        path = language.checkpoint.path
        folder = path.with_name(f"{path.name}-adapter")
        source = AdapterSource(1, str(folder), check_adapter(language, folder, 4))
        requests, _ = served(runner, adapter=source)
        found["adapter"] = [request.output_ids for request in requests]
        assert found["adapter"] != found["greedy"]
    assert found["greedy"] == found["drafts"] != found["sampled"]
    return found


class Noted(MemoryCheckpoint):
    """Notes the tensors that are read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = []

    def spec(self, name):
        return self._tensors[name].dtype, self._tensors[name].shape

    def tensor(self, name):
        self.read.append(name)
        return super().tensor(name)


def check_expert_reads(hf, tensors, config, **division):
    """Of two ranks, each reads and holds the half of the eight experts that it owns."""
    files = Noted(hf, tensors)
    language = LanguageModel(mixtral.MODEL, mixtral.MODEL.config(hf), files)
    runner = runner_over(language, 1, config, **division)
    experts = sorted(name for name in tensors if ".experts." in name)
    assert sorted(name for name in files.read if ".experts." in name) == experts
    for rank in runner.runners:
        layers = rank.loaded.weights.layers
        assert {layer.mlp.experts.gate.shape for layer in layers} == {(4, 32, 48)}
