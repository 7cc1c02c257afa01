"""Counts of blocks from each tier in /metrics."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")

from inl.serve.metrics import Metrics


def exported(engine):
    metrics = Metrics(vllm_names=False)
    metrics.of("m").observe(SimpleNamespace(open=0, rejected=0), lambda: engine)
    return metrics.text().decode()


def engine_of(tiers, remote=None):
    stats = SimpleNamespace(preemptions=0)
    core = SimpleNamespace(running_requests=0, kv_usage=0, failed_steps=0)
    return SimpleNamespace(
        core=core, stats=stats, speculation=None, tiers=tiers, remote_prefill=remote
    )


def test_hits_are_counted_by_tier_and_records_by_kind():
    disk = SimpleNamespace(counts=Counter(written=7, stale=2))
    text = exported(engine_of(SimpleNamespace(hits=Counter(host=3, disk=4), disk=disk)))
    found = {
        (name, value): float(count)
        for name, value, count in re.findall(
            r'^inl:kv_(\w+)_total\{.*(?:tier|kind)="(\w+)".*\} (\S+)$', text, re.M
        )
    }
    assert found == {
        ("tier_hit_blocks", "host"): 3,
        ("tier_hit_blocks", "disk"): 4,
        ("disk_records", "written"): 7,
        ("disk_records", "missing"): 0,
        ("disk_records", "damaged"): 0,
        ("disk_records", "foreign"): 0,
        ("disk_records", "stale"): 2,
    }


def test_without_tiers_there_are_no_counts():
    assert "inl:kv_tier_hit_blocks_total{" not in exported(engine_of(None))


def test_prompts_of_other_engines_are_counted_by_kind():
    remote = SimpleNamespace(counts=Counter(done=5, foreign=1, blocks=99))
    pattern = r'^inl:remote_prefill_total\{.*kind="(\w+)".*\} (\S+)$'
    found = dict(re.findall(pattern, exported(engine_of(None, remote)), re.M))
    assert {kind: float(count) for kind, count in found.items() if float(count)} == {
        "done": 5, "foreign": 1,
    }  # fmt: skip
    assert len(found) == 7
    assert "inl:remote_prefill_total{" not in exported(engine_of(None))
