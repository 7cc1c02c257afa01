"""Engines that are asked for tiers: what they refuse, and what a second one finds."""

from __future__ import annotations

import logging

import pytest

from inl.engine import block_tiers
from inl.errors import RequestError
from inl.kv_tiers import host_size, host_tier
from inl.runners.local_runner import LocalRunner
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from lora_files import LoraFiles

PROMPT = list(range(40, 110))
"""Four full blocks of 16 tokens."""


def test_a_second_engine_reads_what_the_first_one_has_written(engines, tmp_path):
    disk = f"1GiB:{tmp_path / 'kv'}"
    first = engines(kv_disk=disk)
    wanted = first.generate(PROMPT, max_tokens=5, temperature=0)
    first.close()
    second = engines(kv_disk=disk)
    found = second.generate(PROMPT, max_tokens=5, temperature=0)
    assert found.token_ids == wanted.token_ids
    assert (wanted.cached_tokens, found.cached_tokens) == (0, 64)
    assert second.tiers.hits == {"disk": 4}


def test_settings_that_change_keys_and_values_share_no_files(engines, tmp_path):
    disk = f"1GiB:{tmp_path / 'kv'}"
    foreign = []
    for settings in ({}, {"kv_dtype": "fp8"}, {"quantize": "int8"}, {}):
        engine = engines(kv_disk=disk, **settings)
        found = engine.generate(PROMPT, max_tokens=2, temperature=0)
        assert found.cached_tokens == 0
        engine.close()
        foreign.append(engine.tiers.disk.counts["foreign"])
    # A model that is quantized while it is loaded has other keys.
    assert [count > 0 for count in foreign] == [False, True, False, True]


def test_a_tenant_finds_no_blocks_of_another(engines, tmp_path):
    disk = f"1GiB:{tmp_path / 'kv'}"
    first = engines(kv_disk=disk)
    first.generate(PROMPT, max_tokens=2, cache_salt="one")
    first.close()
    second = engines(kv_disk=disk)
    assert second.generate(PROMPT, max_tokens=2, cache_salt="two").cached_tokens == 0
    assert second.generate(PROMPT, max_tokens=2, cache_salt="one").cached_tokens == 64


def test_an_adapter_finds_no_blocks_of_another(engines, tiny_made, tmp_path):
    """Adapters go by their contents: names and numbers of another start differ."""
    one, two = (
        LoraFiles(tiny_made[1], seed=seed).write(tmp_path / name)
        for seed, name in ((1, "one"), (2, "two"))
    )
    settings = {"kv_disk": f"1GiB:{tmp_path / 'kv'}", "max_adapters": 2}

    def answers(adapters):
        engine = engines(**settings)
        engine.tiers.costs.pays = lambda blocks, tokens: True  # whatever a clock says
        for name, folder in adapters.items():
            engine.load_adapter(name, folder)
        options = {"max_tokens": 5, "temperature": 0}
        found = [
            engine.generate(PROMPT, adapter=name, **options)
            for name in (None, *sorted(adapters))
        ]
        engine.close()
        return [(each.token_ids, each.cached_tokens) for each in found]

    base, first = answers({"a": one})
    assert (base[1], first[1]) == (0, 0)
    again, second, renamed = answers({"a": two, "b": one})
    assert again == (base[0], 64)
    assert second[1] == 0
    assert renamed == (first[0], 64)
    assert len({base[0], first[0], second[0]}) == 3


def test_a_reset_forgets_memory_and_files(engines, tmp_path):
    disk = f"1GiB:{tmp_path / 'kv'}"
    first = engines(kv_disk=disk, kv_host="1MiB")
    first.generate(PROMPT, max_tokens=2)
    first.close()
    second = engines(kv_disk=disk, kv_host="1MiB")
    second.reset_prefix_cache()
    assert second.generate(PROMPT, max_tokens=2).cached_tokens == 0


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"use_kv_cache": False}])
def test_an_engine_that_shares_no_blocks_refuses_tiers(engines, settings):
    with pytest.raises(RequestError, match="shares no blocks of prompts; accepted"):
        engines(kv_host="1GiB", **settings)


@pytest.fixture
def small_tiers(monkeypatch):
    """Any size is large enough to be used."""
    monkeypatch.setattr(host_size, "LEAST_BYTES", 1)


def pool_bytes(engine):
    (count,), (layout,) = engine.runner.limits.blocks, engine.runner.cache_layout.groups
    return count * layout.block_bytes


def free_host(monkeypatch, free):
    monkeypatch.setattr(block_tiers, "free_bytes", lambda: free)


def on_device(monkeypatch, *, is_pinned):
    monkeypatch.setattr(LocalRunner, "is_in_host_memory", property(lambda _: False))
    monkeypatch.setattr(LocalRunner, "has_pinned_memory", property(lambda _: is_pinned))


def test_host_memory_is_used_by_default(engines, small_tiers, caplog):
    """Blocks that the cache had no room for are read from it, with the same tokens."""
    caplog.set_level(logging.INFO, "inl")
    engine = engines()
    assert engine.tiers.host.capacity == 4 * pool_bytes(engine)
    assert engine.tiers.host.used_bytes == 0
    assert engine.tiers.disk is None
    assert "reference:0: blocks that its cache has no room for take up" in caplog.text
    prompts = [[turn, *PROMPT] for turn in range(12)]
    cold = [engine.generate(each, max_tokens=5, temperature=0) for each in prompts]
    assert engine.tiers.host.used_bytes > 0
    again = engine.generate(prompts[0], max_tokens=5, temperature=0)
    assert again.token_ids == cold[0].token_ids
    assert (cold[0].cached_tokens, again.cached_tokens) == (0, 64)
    assert engine.tiers.hits["host"] == 4


def test_little_memory_is_not_used(engines, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "inl")
    assert engines().tiers is None  # of the cache of a tiny model
    monkeypatch.setattr(host_size, "LEAST_BYTES", 1)
    free_host(monkeypatch, 3)
    assert engines().tiers is None
    assert "blocks that its cache has no room for" not in caplog.text


@pytest.mark.parametrize("settings", [{"kv_host": "0"}, {"prefix_cache": False}])
def test_no_host_memory_is_used(engines, small_tiers, settings):
    assert engines(**settings).tiers is None


def test_a_cache_in_host_memory_and_its_evicted_blocks_have_one_budget(
    engines, small_tiers, monkeypatch
):
    size = pool_bytes(engines(kv_host="0"))
    assert engines(cache_bytes=3 * size).tiers.host.capacity == 2 * size
    assert engines(cache_bytes=size // 2).tiers is None
    free_host(monkeypatch, 4 * (size + size // 8))
    assert engines().tiers.host.capacity == size // 8


def test_a_device_has_a_quarter_of_the_free_host_memory(
    engines, small_tiers, monkeypatch
):
    on_device(monkeypatch, is_pinned=True)
    size = pool_bytes(engines(kv_host="0"))
    free_host(monkeypatch, 8 * size)
    assert engines().tiers.host.capacity == 2 * size
    assert engines(cache_bytes=size).tiers.host.capacity == 2 * size
    free_host(monkeypatch, 800 * size)
    assert engines().tiers.host.capacity == 4 * size


def test_copies_in_the_way_of_steps_are_not_made_unasked(
    engines, small_tiers, monkeypatch, tmp_path
):
    on_device(monkeypatch, is_pinned=False)
    assert engines().tiers is None
    assert engines(kv_host="1MiB").tiers.host.capacity == 1 << 20
    assert engines(kv_disk=f"1GiB:{tmp_path / 'kv'}").tiers.host.capacity == 0
    runner = HashRunner(Limits(5, (99,), 4, 8, 256, depth=2))
    assert engines(runner=runner).tiers is None


def test_memory_that_others_need_is_left(engines, small_tiers, monkeypatch):
    """Several engines of a host may each have counted on the same memory."""
    monkeypatch.setattr(host_tier, "GROWTH", 1)
    free_host(monkeypatch, 1 << 30)
    engine = engines()
    engine.generate([[turn, *PROMPT] for turn in range(8)], max_tokens=1)
    used = engine.tiers.host.used_bytes
    assert used > 0
    free_host(monkeypatch, (1 << 29) - 1)
    engine.generate([[turn, *PROMPT] for turn in range(8, 16)], max_tokens=1)
    assert engine.tiers.host.used_bytes <= used + 2
    free_host(monkeypatch, 1 << 29)
    engine.generate([[turn, *PROMPT] for turn in range(16, 24)], max_tokens=1)
    assert engine.tiers.host.used_bytes > used + 2
