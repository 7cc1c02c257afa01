"""A prefix from the device, memory or files gives the tokens of computing it.

For every family that shares blocks, on the native CPU backend in float32.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dataclasses import replace
from typing import NamedTuple

import families
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import wrap
from inl.engine.core import EngineCore
from inl.executor.model_loader import open_model
from inl.kv_tiers.disk_tier import DiskTier
from inl.kv_tiers.host_tier import HostTier
from inl.kv_tiers.record import Identity
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.runners.local_runner import start_runner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.cache import Paged, Slotted
from inl.spec.limits import Limits
from inl_cpu.backend import open_cpu

COUNT = 8


class AlwaysPays(Costs):
    """Loads whenever it can: what a clock says must not decide a test."""

    def pays(self, blocks, tokens):
        return True


def core_of(made, tiers, kv_dtype="auto"):
    backend, config = open_cpu(Device("cpu:0")), EngineConfig(kv_dtype=kv_dtype)
    if kv_dtype == "auto":
        runner = families.opened(made, backend)
    else:
        config = replace(config, dtype="float32")
        language = open_model(made.path)
        state = language.model.state(replace(language.config, dtype="float32"))
        groups = sum(isinstance(item, Paged) for item in state)
        limits = Limits(4, (48,) * groups, 4, 12, families.VOCAB)
        runner = start_runner(language, backend, config, limits=limits)
    layouts = runner.cache_layout.groups
    disk = DiskTier(tiers, 1 << 28, Identity("model", "float32", layouts))
    tiers = BlockTiers(AlwaysPays(), host_bytes=1 << 20, disk=disk)
    core = EngineCore(runner, SchedulerConfig(model_digest="model"), tiers=tiers)
    return core, tiers


class Answer(NamedTuple):
    tokens: list[int]
    cached: int
    logprobs: list
    """Of each token, and of the three most likely ones."""


def answer(core, prompt):
    request = Request(prompt, max_tokens=COUNT, logprobs=3)
    core.add(request)
    while core.has_work:
        assert [each.error for each in core.step() if each.error] == []
    return Answer(request.output_ids, request.cached_tokens, request.token_logprobs)


def closed(core, tiers):
    core.flush_tiers()
    core.runner.close()
    tiers.close()


def check(made, folder, kv_dtype="auto"):
    """Compare a prompt that is computed with what each place has of it."""
    prompts = [[*made.ids[: 36 - turn], 3 + turn] for turn in range(6)]
    prompts = [[*prompt[turn:], *prompt[:turn]] for turn, prompt in enumerate(prompts)]
    core, tiers = core_of(made, folder, kv_dtype)
    spec = core.runner.loaded.shard_state()
    if any(isinstance(item, Slotted) for item in spec):
        closed(core, tiers)
        pytest.skip("every token changes state that blocks do not hold")
    cold = answer(core, prompts[0])
    device = answer(core, prompts[0])
    hits = tiers.hits.total()
    others = [answer(core, prompt) for prompt in prompts[1:]]
    host = answer(core, prompts[0])
    host_hits = dict(tiers.hits)
    closed(core, tiers)
    core, tiers = core_of(made, folder, kv_dtype)
    disk = answer(core, prompts[0])
    closed(core, tiers)
    # Their first block differs, so that they share none.
    assert [each.cached for each in (cold, *others)] == [0] * 6
    assert (hits, tiers.hits["host"]) == (0, 0)
    assert host_hits["host"] > 0
    assert tiers.hits["disk"] > 0
    for name, each in (("device", device), ("host", host), ("disk", disk)):
        assert (each.tokens, each.cached) == (cold.tokens, 36), name
        # The same steps over the same contents: every bit is equal.
        assert each.logprobs == device.logprobs, name
    return cold, device


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.full] if name in families.OF_OTHERS else []
        )
        for name in families.FAMILIES
    ],
)
def test_every_tier_gives_the_same_tokens(name, tmp_path):
    check(families.make(name, tmp_path / "model"), tmp_path / "kv")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("name", ["llama3", "qwen2-window", "glm5"])
def test_caches_of_fewer_bits_are_copied_whole(name, kv_dtype, tmp_path):
    check(families.make(name, tmp_path / "model"), tmp_path / "kv", kv_dtype)


def test_another_number_in_a_block_is_found(tmp_path, monkeypatch):
    """A changed number shows in the bits of the log-probabilities."""
    made = families.make("llama3", tmp_path / "model")
    put = HostTier.put

    def changed(self, place, parts):
        cells = parts["cells"].data.copy()
        cells.flat[5] += 0.01
        return put(self, place, {"cells": wrap(cells)})

    monkeypatch.setattr(HostTier, "put", changed)
    with pytest.raises(AssertionError, match="host"):
        check(made, tmp_path / "kv")
