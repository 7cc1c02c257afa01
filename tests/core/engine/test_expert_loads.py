"""Tokens of each expert: counts of steps against float64 routing, by placement."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

import mixture_answers
from depth import mostly_full
from inl import EngineConfig
from inl.engine.core import EngineCore
from inl.engine.expert_loads import ExpertLoads
from inl.errors import ProtocolError, RequestError
from inl.executor.model_loader import LanguageModel
from inl.models import llama, mixtral
from inl.protocol.runner import Reply
from inl.protocol.wire_arrays import read_reply, reply
from inl.runners import local_runner
from inl.scheduling.request import Request
from inl.serve.metrics import Metrics
from inl.spec.step import Scores
from inl.testing import tiny
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from mixture_answers import PROMPTS
from rank_engines import runner_over

HF, TENSORS = mixture_answers.made()
CONFIG = EngineConfig(
    backend="reference", dtype="float32", context=64, depth=2, max_batch=3,
    token_budget=16, expert_load_interval=1,
)  # fmt: skip


def language():
    config = mixtral.MODEL.config(HF)
    return LanguageModel(mixtral.MODEL, config, MemoryCheckpoint(HF, TENSORS))


def served(runner, prompts=PROMPTS, **options):
    core = EngineCore(runner)
    requests = [Request(prompt, max_tokens=12, **options) for prompt in prompts]
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    core.runner.close()
    return core, requests


@pytest.fixture
def exact(monkeypatch):
    """Counts of the tokens that float64 logits of the router choose, [layers, E]."""
    real, seen = tiny._plain_feed_forward, {}

    def noted(config, w, y, at):
        logits = y @ w[f"{at}block_sparse_moe.gate.weight"].T
        chosen = np.argsort(-logits)[:, : config["num_experts_per_tok"]]
        seen.setdefault(at, []).append(np.bincount(chosen.ravel(), minlength=8))
        return real(config, w, y, at)

    monkeypatch.setattr(tiny, "_plain_feed_forward", noted)

    def counts(requests):
        seen.clear()
        for request in requests:
            tiny.plain_logits(HF, TENSORS, request.tokens[:-1])
        return np.stack([np.sum(seen[at], 0) for at in sorted(seen)])

    return counts


def check(loads, requests, exact):
    """The last layer computes some of the tokens only."""
    expected = exact(requests)
    assert np.array_equal(loads.counts[:-1], expected[:-1])
    assert (loads.counts[-1] <= expected[-1]).all()
    assert loads.counts[-1].sum() >= 2 * 12 * len(requests)


SIZES = [{}, {"experts": 2}, {"rows": 2}, {"rows": 2, "experts": 2}]


@pytest.mark.parametrize("sizes", mostly_full(SIZES, quick=3), ids=str)
def test_loads_are_those_of_float64_routing(sizes, exact):
    core, requests = served(runner_over(language(), 1, CONFIG, **sizes))
    assert core.expert_loads.steps == core.stats.steps
    check(core.expert_loads, requests, exact)


def test_tokens_are_those_without_counts():
    texts = []
    for interval in (None, 1, 3):
        config = replace(CONFIG, expert_load_interval=interval)
        core, requests = served(runner_over(language(), 1, config), temperature=0.7)
        assert bool(core.expert_loads.steps) == bool(interval)
        texts.append([request.output_ids for request in requests])
    assert texts[0] == texts[1] == texts[2]
    assert 0 < core.expert_loads.steps < core.stats.steps


def padded(ids, head, experts):
    """Padding is counted too."""
    return np.stack([np.bincount(each.ravel(), minlength=experts) for each in ids])


@pytest.mark.parametrize("fault", [None, padded])
def test_padding_is_left_out(fault, exact, monkeypatch):
    if fault is not None:
        monkeypatch.setattr(local_runner, "counted", fault)
    core, requests = served(runner_over(language(), 1, CONFIG, rows=2))
    same = np.array_equal(core.expert_loads.counts[:-1], exact(requests)[:-1])
    assert same == (fault is None)


def test_a_model_without_experts_counts_none():
    hf, tensors = tiny_llama(np.random.default_rng(3))
    model = LanguageModel(
        llama.MODEL, llama.MODEL.config(hf), MemoryCheckpoint(hf, tensors)
    )
    core, _ = served(runner_over(model, 1, CONFIG))
    assert not core.expert_loads.steps
    assert core.expert_loads.imbalance() == []


def test_imbalance_is_the_most_over_the_mean():
    loads = ExpertLoads()
    loads.add(np.array([[6, 2, 0, 0], [1, 1, 1, 1]], np.int32))
    loads.add(np.array([[2, 2, 4, 0], [1, 1, 1, 1]], np.int32))
    assert loads.imbalance() == [2.0, 1.0]
    assert loads.imbalance(2) == [1.5, 1.0]


def test_loads_travel_in_replies():
    loads = np.arange(6, dtype=np.int32).reshape(2, 3)
    scores = Scores(*(np.ones(shape, np.float32) for shape in ((4,), (4, 2), (4, 2))))
    scores = scores._replace(ids=np.ones((4, 2), np.int32))
    for given in (None, scores):
        sent = Reply(9, np.array([[1], [2], [3], [4]], np.int32), given, None, loads)
        found = read_reply(bytes(reply(sent)))
        assert np.array_equal(found.loads, loads)
        assert np.array_equal(found.tokens, sent.tokens)
        assert (found.scores is None) == (given is None)
    with pytest.raises(ProtocolError, match=r"loads of \[9, 3\]"):
        read_reply(np.array([9, -4, 1, 9, 3, 0], np.int32).tobytes())


def test_loads_are_exported_by_layer():
    loads = ExpertLoads()
    loads.add(np.array([[6, 2, 0, 0], [1, 1, 1, 1]], np.int32))
    config = EngineConfig(placement="expert=2")
    core = SimpleNamespace(expert_loads=loads)
    names = "speculation", "tiers", "remote_prefill", "snapshots", "shared_blocks"
    absent = dict.fromkeys(names)
    stats = SimpleNamespace(preemptions=0)
    runner = SimpleNamespace(limits=SimpleNamespace(adapters=0))
    engine = SimpleNamespace(
        core=core, config=config, stats=stats, runner=runner, adapters=(),
        encoder_load={}, **absent,
    )  # fmt: skip
    metrics = Metrics(vllm_names=False)
    of = metrics.of("m")
    of.observe(SimpleNamespace(open=0, rejected=0), lambda: None)
    name = "inl:expert_load_imbalance{"
    assert name not in metrics.text().decode()
    of._engine = lambda: engine
    lines = [line for line in metrics.text().decode().split("\n") if name in line]
    found = {
        tuple(re.findall(r'(?:layer|of)="(\w+)"', line))[::-1]: float(line.split()[-1])
        for line in lines
    }
    assert found == {
        ("experts", "0"): 3.0, ("experts", "1"): 1.0,
        ("devices", "0"): 2.0, ("devices", "1"): 1.0,
    }  # fmt: skip


def test_a_pipeline_is_refused():
    with pytest.raises(RequestError, match="expert_load_interval"):
        EngineConfig(placement="pipeline=2", expert_load_interval=1)
