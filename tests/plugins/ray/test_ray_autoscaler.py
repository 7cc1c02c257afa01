"""A worker in a cluster whose hosts Ray's autoscaler starts: from none to one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ray_hosts import RAY, Hosts, ip
from waiting import until

SPACE = "inl-ray-auto"
ADDRESS = "10.78.0.1"
PORT = 6391
PROMPT = "The capital of France is"
GENERATE = ("-m", "inl", "generate", PROMPT, "--max-tokens", "8", "--device")
CLUSTER = {"RAY_ADDRESS": f"{ADDRESS}:{PORT}"}
GROWS = {**CLUSTER, "INL_RAY_AUTOSCALER": "1"}

CONFIG = {
    "cluster_name": "fake",
    "max_workers": 1,
    "idle_timeout_minutes": 60,
    "upscaling_speed": 100.0,
    "provider": {
        "type": "fake_multinode",
        "disable_node_updaters": True,
        "gcs_address": f"{ADDRESS}:{PORT}",
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {
            "resources": {"CPU": 0}, "node_config": {}, "max_workers": 0,
        },
        "ray.worker.cpu": {
            "resources": {"CPU": 1, "object_store_memory": 100_000_000},
            "node_config": {}, "min_workers": 0, "max_workers": 1,
        },
    },
    "head_node_type": "ray.head.default",
    "auth": {},
    "head_node": {},
    "worker_nodes": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}  # fmt: skip
"""Of Ray's provider of hosts that are processes of one host, for its own tests."""


class Head(Hosts):
    """The only host: it has no processor for workers."""

    def prefix(self, host):
        return "ip", "netns", "exec", SPACE


@pytest.fixture
def head(ray_environment, tmp_path):
    made = Head(
        ray_environment | {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    )
    config = tmp_path / "autoscaler.json"
    config.write_text(json.dumps(CONFIG))
    ip("netns", "add", SPACE)
    try:
        ip("-n", SPACE, "link", "set", "lo", "up")
        ip("-n", SPACE, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
        done = made.run(
            0, RAY, "start", "--head", "--port", PORT, "--node-ip-address", ADDRESS,
            "--num-cpus", 0, "--include-dashboard", "false", "--disable-usage-stats",
            "--object-store-memory", 100_000_000, "--autoscaling-config", config,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        yield made
    finally:
        until(lambda: not processes(kill=True))
        subprocess.run(["ip", "netns", "del", SPACE], check=False)


def processes(*, kill=False):
    """Return the ids of the processes of the host."""
    found = subprocess.run(
        ["ip", "netns", "pids", SPACE], text=True, capture_output=True, check=True
    ).stdout.split()
    if kill and found:
        subprocess.run(["kill", "-9", *found], check=False, capture_output=True)
    return found


@pytest.mark.timeout(900)
def test_a_worker_starts_the_first_host_of_a_cluster(head):
    refused = head.run(0, sys.executable, *GENERATE, "ray:cpu:0", **CLUSTER)
    assert refused.returncode == 2
    assert "a worker takes 1 CPU, found 10.78.0.1: nothing" in refused.stderr
    assert "INL_RAY_AUTOSCALER=1 if hosts are started on demand" in refused.stderr
    plain = head.run(0, sys.executable, *GENERATE, "cpu:0")
    assert plain.returncode == 0, plain.stderr
    done = head.run(0, sys.executable, *GENERATE, "ray:cpu:0", **GROWS)
    assert done.returncode == 0, done.stderr
    assert plain.stdout.strip() in done.stdout
    # What no type of host has is waited for in vain, and said to be.
    words = "-c", ENGINE, "ray:cuda:0"
    vain = head.run(0, sys.executable, *words, **GROWS)
    assert vain.returncode == 2, vain.stderr
    assert "Ray has not started its actor, of 1 GPU, for" in vain.stderr
    # Not the loopback interface: the host that may come is another one.
    assert f"did not connect to {ADDRESS}:" in vain.stdout
    assert (
        "Ray has not started its actor, of 1 GPU; the cluster has 10.78.0.1: "
        in vain.stdout
    )


ENGINE = """
import sys
from inl import EngineConfig, InferenceEngine
from inl.errors import InlError
try:
    InferenceEngine.from_pretrained(
        config=EngineConfig(backend=sys.argv[1], worker_seconds=30.0)
    )
except InlError as error:
    print(error, flush=True)
    sys.exit(2)
"""
