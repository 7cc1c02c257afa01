"""Counts of blocks from each tier in /metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

import inl.serve
from http_servers import HashServer, hash_engine
from inl.config import EngineConfig
from inl.dtypes import wrap
from inl.kv_tiers.state_snapshots import StateSnapshots
from inl.serve.metrics import Metrics
from inl.serve.server import engine_config

PAGE = Path(inl.serve.__file__).parent / "page"


def exported(engine):
    metrics = Metrics(vllm_names=False)
    metrics.of("m").observe(SimpleNamespace(open=0, rejected=0), lambda: engine)
    return metrics.text().decode()


def engine_of(tiers, remote=None, snapshots=None):
    stats = SimpleNamespace(preemptions=0)
    loads = SimpleNamespace(steps=0)
    core = SimpleNamespace(
        running_requests=0, kv_usage=0, failed_steps=0, expert_loads=loads
    )
    runner = SimpleNamespace(limits=SimpleNamespace(adapters=0))
    return SimpleNamespace(
        runner=runner,
        adapters=(),
        core=core,
        stats=stats,
        speculation=None,
        tiers=tiers,
        remote_prefill=remote,
        snapshots=snapshots,
        shared_blocks=None,
        encoder_load={},
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


def test_snapshots_are_counted_by_what_became_of_them():
    snapshots = StateSnapshots(12)
    snapshots.put(b"a", {"x": wrap(np.zeros(2, np.float32))})
    snapshots.put(b"b", {"x": wrap(np.zeros(2, np.float32))})
    snapshots.take(b"b")
    text = exported(engine_of(None, snapshots=snapshots))
    pattern = r'^inl:state_snapshots_total\{.*kind="(\w+)".*\} (\S+)$'
    found = dict(re.findall(pattern, text, re.M))
    assert {kind: float(count) for kind, count in found.items()} == {
        "taken": 2, "restored": 1, "dropped": 1,
    }  # fmt: skip
    assert re.search(r"^inl:state_snapshot_bytes\{.*\} 8.0$", text, re.M)
    assert "inl:state_snapshots_total{" not in exported(engine_of(None))


def test_prompts_of_other_engines_are_counted_by_kind():
    remote = SimpleNamespace(counts=Counter(done=5, foreign=1, blocks=99))
    pattern = r'^inl:remote_prefill_total\{.*kind="(\w+)".*\} (\S+)$'
    found = dict(re.findall(pattern, exported(engine_of(None, remote)), re.M))
    assert {kind: float(count) for kind, count in found.items() if float(count)} == {
        "done": 5, "foreign": 1,
    }  # fmt: skip
    assert len(found) == 8
    assert "inl:remote_prefill_total{" not in exported(engine_of(None))


class TieredServer(HashServer):
    """A server whose engine has host memory for blocks, and files."""

    def __init__(self, folder):
        self._folder = folder
        super().__init__(max_batch=1)

    def _open(self, on_step):
        config = engine_config(EngineConfig(), self.config, self._max_batch)
        config = replace(config, kv_host="64KiB", kv_disk=f"1GiB:{self._folder}")
        self.engine = hash_engine(self._max_batch, config=config, on_step=on_step)
        return self.engine

    def ask(self, first):
        body = {"prompt": [first] * 600, "max_tokens": 1}
        assert self.send("POST", "/v1/completions", body)[0] == 200
        self.wait_idle()

    def metrics(self):
        return self.send("GET", "/metrics")[2].decode()


def hits(text):
    pattern = r'^inl:kv_tier_hit_blocks_total\{.*tier="(\w+)".*\} (\S+)$'
    return {tier: float(count) for tier, count in re.findall(pattern, text, re.M)}


@pytest.fixture(scope="module")
def readings(tmp_path_factory):
    """Texts of /metrics before and after a prompt of each tier, and the blocks."""
    with TieredServer(tmp_path_factory.mktemp("tiers") / "kv") as server:
        for first in range(20):
            server.ask(first)
        before = server.metrics()
        tiers, places = server.engine.tiers, server.engine.core.scheduler.kv_cache.pools
        for pool in places:
            pool.forget()
        server.engine.tiers.disk.flush()
        server.ask(16)
        middle = server.metrics()
        server.ask(0)
        yield before, middle, server.metrics(), dict(tiers.hits)


def test_a_server_counts_the_blocks_of_each_tier(readings):
    before, middle, after, counts = readings
    assert hits(before) == {"host": 0, "disk": 0}
    assert hits(middle).keys() == hits(after).keys() == {"host", "disk"}
    assert sum(hits(middle).values()) == 37  # 600 tokens but the last, in blocks of 16
    assert hits(after) == counts
    assert counts["host"] > 0
    assert counts["disk"] > 0


SCRIPT = """
const vm = require("vm");
const target = Object.assign(() => any, { [Symbol.iterator]: () => [].values() });
const any = new Proxy(target, {
  get: (_, name) => name === "value" ? "hash" : name === "hidden" ? true
    : name === Symbol.toPrimitive ? () => "" : any,
  set: () => true, apply: () => any,
});
const context = { element: () => any, document: { hidden: true }, headers: () => any,
  setTimeout: () => 0, performance, out: null };
const { code, texts } = JSON.parse(require("fs").readFileSync(0, "utf8"));
vm.runInNewContext(code + `;out = (before, after) => Object.fromEntries(
  Object.entries(CHARTS).map(([title, read]) =>
    [title, read(parse(after), parse(before), 2)]));`, context);
console.log(JSON.stringify(context.out(...texts)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_page_shows_the_blocks_of_each_tier(readings):
    before, _, after, counts = readings
    code = (PAGE / "charts.js").read_text()
    done = subprocess.run(
        ["node", "-e", SCRIPT], input=json.dumps({"code": code,
        "texts": [before, after]}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["Blocks from host memory, 1/s"] == counts["host"] / 2
    assert shown["Blocks from files, 1/s"] == counts["disk"] / 2
