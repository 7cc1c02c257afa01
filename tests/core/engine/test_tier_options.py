"""Engines that are asked for tiers: what they refuse, and what a second one finds."""

from __future__ import annotations

import pytest

from inl.errors import RequestError

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


def test_no_tiers_are_the_default(engines):
    assert engines().tiers is None
    assert engines(kv_host="0").tiers is None
