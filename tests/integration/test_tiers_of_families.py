"""A prefix from the device, memory or files gives the tokens of computing it.

For every family that shares blocks, on the native CPU backend in float32.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import families
from inl.device import Device
from inl.engine.core import EngineCore
from inl.kv_tiers.disk_tier import DiskTier
from inl.kv_tiers.record import Identity
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.cache import Slotted
from inl_cpu.backend import open_cpu

COUNT = 8


class AlwaysPays(Costs):
    """Loads whenever it can: what a clock says must not decide a test."""

    def pays(self, blocks, tokens):
        return True


def core_of(made, tiers):
    runner = families.opened(made, open_cpu(Device("cpu:0")))
    disk = None
    if tiers is not None:
        layouts = runner.cache_layout.groups
        disk = DiskTier(tiers, 1 << 28, Identity("model", "float32", layouts))
    tiers = BlockTiers(AlwaysPays(), host_bytes=1 << 20, disk=disk)
    core = EngineCore(runner, SchedulerConfig(model_digest="model"), tiers=tiers)
    return core, tiers


def answer(core, prompt):
    request = Request(prompt, max_tokens=COUNT)
    core.add(request)
    while core.has_work:
        assert [each.error for each in core.step() if each.error] == []
    return request.output_ids, request.cached_tokens


def closed(core, tiers):
    core.flush_tiers()
    core.runner.close()
    tiers.close()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_tier_gives_the_same_tokens(name, tmp_path):
    made = families.make(name, tmp_path / "model")
    prompts = [[*made.ids[: 36 - turn], 3 + turn] for turn in range(6)]
    prompts = [[*prompt[turn:], *prompt[:turn]] for turn, prompt in enumerate(prompts)]
    core, tiers = core_of(made, tmp_path / "kv")
    spec = core.runner.loaded.shard_state()
    if any(isinstance(item, Slotted) for item in spec):
        closed(core, tiers)
        pytest.skip("every token changes state that blocks do not hold")
    cold = [answer(core, prompt) for prompt in prompts]
    device = answer(core, prompts[-1])
    host = answer(core, prompts[0])
    hits = dict(tiers.hits)
    closed(core, tiers)
    core, tiers = core_of(made, tmp_path / "kv")
    disk = answer(core, prompts[0])
    closed(core, tiers)
    # Their first block differs, so that they share none.
    assert [cached for _, cached in cold] == [0] * 6
    assert device == (cold[-1][0], 28)
    assert host == (cold[0][0], 36)
    assert hits["host"] > 0
    assert disk == (cold[0][0], 36)
    assert tiers.hits["disk"] > 0
