"""A Ray cluster of three hosts, which are network namespaces of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import until

HOSTS = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
PORT = 6390
RAY = Path(sys.executable).with_name("ray")
START_SECONDS = 240


class Hosts:
    """Namespaces ``inl-ray-0`` and so on, joined by a bridge."""

    def __init__(self, environment):
        self.environment = environment

    def run(self, host, *words, **environment):
        """Run a command on a host to its end; returns what it printed."""
        return subprocess.run(
            [*self.prefix(host), *map(str, words)], capture_output=True, text=True,
            env=self.environment | environment, timeout=START_SECONDS, check=False,
        )  # fmt: skip

    def prefix(self, host):
        return "ip", "netns", "exec", f"inl-ray-{host}"

    def start(self, host, *words, **environment):
        """Start a command on a host."""
        return subprocess.Popen(
            [*self.prefix(host), *map(str, words)],
            env=self.environment | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def processes(self, host):
        """Return the ids of the processes on a host."""
        done = subprocess.run(
            ["ip", "netns", "pids", f"inl-ray-{host}"],
            text=True, capture_output=True, check=True,
        )  # fmt: skip
        return {int(word) for word in done.stdout.split()}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="session")
def ray_environment():
    """Environment of the processes of a cluster."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "INL_PLUGINS": "inl_cpu.plugin,inl_ray.plugin",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "2",
    }


@pytest.fixture(scope="session")
def hosts(ray_environment):
    """Three hosts, the first of which has the cluster's head."""
    made = Hosts(ray_environment)
    ip("link", "add", "inl-ray", "type", "bridge")
    try:
        ip("link", "set", "inl-ray", "up")
        for host, address in enumerate(HOSTS):
            space = f"inl-ray-{host}"
            ip("netns", "add", space)
            ip("link", "add", f"inl-ray{host}", "type", "veth", "peer", "name", "e0",
               "netns", space)  # fmt: skip
            ip("link", "set", f"inl-ray{host}", "master", "inl-ray", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "e0")
            ip("-n", space, "link", "set", "e0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        for host, address in enumerate(HOSTS):
            join(made, host, address)
        yield made
    finally:
        for host in range(len(HOSTS)):
            stop(made, host)
        subprocess.run(["ip", "link", "del", "inl-ray"], check=False)


def join(hosts, host, address):
    """Start Ray on a host."""
    head = ["--head", "--port", PORT, "--include-dashboard", "false"]
    words = head if host == 0 else ["--address", f"{HOSTS[0]}:{PORT}"]
    done = hosts.run(
        host, RAY, "start", *words, "--node-ip-address", address, "--num-cpus", 1,
        "--object-store-memory", 100_000_000, "--disable-usage-stats",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def stop(hosts, host):
    """End a host with all of its processes."""
    space = f"inl-ray-{host}"
    found = subprocess.run(
        ["ip", "netns", "pids", space], text=True, capture_output=True, check=False
    ).stdout.split()
    for word in found:
        subprocess.run(["kill", "-9", word], check=False, capture_output=True)
    until(lambda: not hosts.processes(host))
    subprocess.run(["ip", "netns", "del", space], check=False)
