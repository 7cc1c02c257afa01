"""Recurrent families that continue from snapshots, against transformers."""

from __future__ import annotations

import functools
import importlib
import json
import sys

import numpy as np
import pytest

from byte_tokens import bytes_as_tokens
from depth import mostly_full
from inl.cli.main import main
from inl.config import EngineConfig
from inl.device import Device
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model
from inl.kv_tiers.state_snapshots import StateSnapshots
from inl.spec.cache_layout import SLOT_GROUP
from inl.spec.message import (
    READ,
    WRITE,
    Row,
    admit_frame,
    release_frame,
    step_frame,
    transfer_frame,
)
from inl.spec.step import Bucket

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
families = importlib.import_module("families")

NAMES = [
    "lfm2", "falcon-h1", "qwen3.5", "qwen3-next", "qwen3.5-moe", "granite-hybrid",
    "bamba", "nemotron-h", "lfm2-moe",
]  # fmt: skip
BOUND, COUNT = 1e-4, 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def get(name):
        return families.make(
            name, tmp_path_factory.mktemp(name), max_position_embeddings=256
        )

    return functools.cache(get)


def backend_named(name):
    if name == "reference":
        return families.reference(), "float64"
    if name == "cpu":
        from inl_cpu.backend import open_cpu

        return open_cpu(Device("cpu:0")), "float32"
    from inl_cpu.torch_backend import TorchCpuBackend

    return TorchCpuBackend(Device("cpu:0")), "float32"


class Rows:
    """Steps of one row on a runner with blocks 1 to 12 in its table."""

    def __init__(self, runner):
        self.runner, self.step = runner, 0
        self.sizes = {"groups": runner.limits.groups, "max_blocks_per_seq": 12}

    def admit(self, slot, length=0):
        tables = [[*range(1, 13)]] * self.sizes["groups"]
        frame = admit_frame(slot, tables, length=length, **self.sizes)
        self.runner.submit(frame)

    def release(self, slot):
        self.runner.submit(release_frame(slot, **self.sizes))

    def logits(self, slot, ids):
        rows = [Row(slot, ids, [0.0] * len(ids))]
        frame = step_frame(
            Bucket(len(ids), 1, len(ids)), rows, step=self.step,
            groups=self.sizes["groups"], block_size=self.runner.limits.block_size,
            decode_rows=int(len(ids) == 1),
        )  # fmt: skip
        self.step += 1
        return np.asarray(self.runner.logits(frame).data)[-len(ids) :]

    def read(self, slot):
        self.runner.submit(transfer_frame(READ, SLOT_GROUP, [slot]))
        return self.runner.read()


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("name", mostly_full(NAMES, 3))
def test_logits_after_a_snapshot_are_transformers(name, backend, made):
    """Another sequence has used both slots meanwhile; other state is told apart."""
    one = made(name)
    runner = families.opened(one, *backend_named(backend))
    rows = Rows(runner)
    rows.admit(1)
    rows.logits(1, one.ids[:8])
    earlier = rows.read(1)
    rows.logits(1, one.ids[8:12])
    state = rows.read(1)
    rows.release(1)
    for slot in (1, 2):
        # A text whose keys and values are those of other blocks.
        families_text = [[13, *range(14, 25)]] * rows.sizes["groups"]
        runner.submit(admit_frame(slot, families_text, **rows.sizes))
        rows.logits(slot, one.ids[20:31])
        rows.release(slot)

    def rest(parts):
        runner.write(transfer_frame(WRITE, SLOT_GROUP, [2]), parts)
        rows.admit(2, 12)
        found = rows.logits(2, one.ids[12:])
        rows.release(2)
        return families.distance(found, one.logits[12:])

    assert rest(state) < BOUND
    assert rest(earlier) > 10 * BOUND
    runner.close()


def answers_of(one, prompts, found):
    """The tokens that transformers chooses at each place of greedy answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        one.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    chosen = []
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits
        chosen.append(logits[0, len(prompt) - 1 : -1].argmax(-1).tolist())
    return chosen


def prompts_of(one):
    """Two with a common beginning, the first one again, and its next turn."""
    first = [*one.ids, *one.ids[::-1], *one.ids[::2]]  # 100 tokens
    other = [*first[:85], *one.ids[3:20]]
    return [first, other, [*first[:85], *one.ids[5:15]], first]


@pytest.mark.parametrize("name", mostly_full(NAMES, 3))
def test_warm_answers_are_those_of_transformers(name, made):
    one = made(name)
    prompts = prompts_of(one)
    config = EngineConfig(backend="cpu", dtype="float32", max_batch=2)
    with InferenceEngine(open_model(one.path), bytes_as_tokens(), config) as engine:
        found, hits = [], []
        for prompt in prompts:
            before = engine.stats.prefix_hit_tokens
            answer = engine.generate(prompt, max_tokens=COUNT, ignore_eos=True)
            found.append(list(answer.token_ids))
            hits.append(engine.stats.prefix_hit_tokens - before)
        size = engine.runner.limits.block_size
        counts = engine.snapshots.counts
    assert found == answers_of(one, prompts, found)
    assert hits == [0, 0, 85 // size * size, 99 // size * size]
    assert counts["restored"] == 2


def test_the_plan_counts_recurrent_state(made, capsys):
    """Of LFM2: two inputs of 48 channels in each of three layers, in float32."""
    path = str(made("lfm2").path)
    words = ["plan", path, "--devices", "1x1GB", "--batch", "3"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["state_bytes"] == 3 * 3 * 2 * 48 * 4
    assert main(words) == 0
    assert (
        "each snapshot of recurrent state takes 1,152 bytes" in capsys.readouterr().out
    )


@pytest.mark.full
def test_a_worker_restores_the_same_state_and_its_trace_replays(made, tmp_path, capsys):
    one, trace = made("qwen3.5"), tmp_path / "trace"
    prompts = prompts_of(one)
    place = f"worker:{sys.executable}/cpu:0"
    config = EngineConfig(backend=place, dtype="float32", max_batch=2, trace=trace)
    with InferenceEngine(open_model(one.path), bytes_as_tokens(), config) as engine:
        found = [
            list(engine.generate(each, max_tokens=COUNT, ignore_eos=True).token_ids)
            for each in prompts
        ]
        assert engine.snapshots.counts["restored"] == 2
    assert found == answers_of(one, prompts, found)
    capsys.readouterr()
    assert main(["replay", str(trace), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "0 skipped" in printed
    assert "every token is the same" in printed


def test_state_of_another_prefix_changes_the_answers(made, monkeypatch):
    """The comparison above finds a snapshot under a wrong key."""
    one = made("qwen3.5")
    prompts = prompts_of(one)
    put, first = StateSnapshots.put, []

    def put_first(self, key, parts):
        first.append(parts)
        put(self, key, parts)

    monkeypatch.setattr(StateSnapshots, "put", put_first)
    monkeypatch.setattr(StateSnapshots, "take", lambda _self, _key: first[0])
    config = EngineConfig(backend="cpu", dtype="float32", max_batch=2)
    with InferenceEngine(open_model(one.path), bytes_as_tokens(), config) as engine:
        found = [
            list(engine.generate(each, max_tokens=COUNT, ignore_eos=True).token_ids)
            for each in prompts
        ]
        assert engine.stats.prefix_hit_tokens
    assert found[:2] == answers_of(one, prompts[:2], found[:2])
    assert found != answers_of(one, prompts, found)
