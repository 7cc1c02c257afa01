"""Starts a worker as an actor of a Ray cluster.

Ray places the actor, keeps the device for it, names it on the dashboard, and notices
the end of its host. Steps and tokens never pass through actor calls: the actor's
process starts the worker, which connects back to the engine.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from inl.workers.settings import ADDRESS, DEVICE, show_address
from inl_ray import cluster

if TYPE_CHECKING:
    from inl.workers.place import Request

log = logging.getLogger("inl.ray")

TAIL_LINES = 50
TAIL_SECONDS = 2.0
"""Time for the actor to answer with the last output."""
KILL_SECONDS = 5.0
REPORT_SECONDS = 10.0
"""Time after which a worker says that it waits for Ray; each time twice as long."""


class WorkerHost:
    """The actor: runs one worker's process, and passes its output on."""

    def __init__(self, seat: int) -> None:
        self._seat = seat
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int | None:
        """Run the worker until it ends; returns its exit status."""
        with self._lock:
            if self._is_stopped:
                return None
            self._process = subprocess.Popen(
                [sys.executable, *arguments], env=os.environ | environment, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, errors="replace",
            )  # fmt: skip
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.append(line)
            # Ray shows it at the engine, with the address of this host.
            print(f"worker {self._seat}: {line}", end="", flush=True)  # noqa: T201
        return self._process.wait()

    def tail(self) -> str:
        """Return the last lines of its output."""
        return "".join(self._lines)

    def stop(self) -> None:
        """End the worker; one that was not started yet will not be."""
        with self._lock:
            self._is_stopped = True
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()


class RayWorker:
    """A worker that an actor runs: an :class:`inl.workers.place.Started`."""

    def __init__(self, actor: Any, ended: Any, name: str, wanted: str) -> None:
        self._actor, self._ended = actor, ended
        self._begun: Any = actor.tail.remote()
        """Done once the actor runs; ``None`` after that was seen."""
        self._wanted = wanted
        self._since = time.monotonic()
        self._report_after = REPORT_SECONDS
        self.name = name
        self._is_stopped = False

    @property
    def alive(self) -> bool:
        """Whether its process runs, or waits for room in the cluster."""
        if self._is_stopped:
            return False
        self._report_waiting()
        return not ray.wait([self._ended], timeout=0)[0]

    def _report_waiting(self) -> None:
        """Say at times that Ray has no room yet, or that the actor starts slowly."""
        if self._waits():
            seconds = time.monotonic() - self._since
            if seconds >= self._report_after:
                self._report_after *= 2
                log.warning(
                    "worker %s: Ray has not started its actor, of %s, for %.0f s",
                    self.name, self._wanted, seconds,
                )  # fmt: skip

    def _waits(self) -> bool:
        if self._begun is not None and ray.wait([self._begun], timeout=0)[0]:
            self._begun = None
        return self._begun is not None

    @property
    def log_tail(self) -> str:
        """Last lines of its output, or what Ray knows of the actor's end."""
        if self._waits():
            found = "; ".join(
                f"{each.address}: {cluster.shown(each.resources)}"
                for each in cluster.nodes()
            )
            return (
                f"Ray has not started its actor, of {self._wanted}; the cluster has "
                f"{found}"
            )
        try:
            return str(ray.get(self._actor.tail.remote(), timeout=TAIL_SECONDS))
        except RayError as error:
            return str(error)

    def stop(self, seconds: float) -> None:
        """Wait so long for its end, then end process and actor."""
        if self._is_stopped:
            return
        self._is_stopped = True
        with suppress(RayError):
            if not ray.wait([self._ended], timeout=seconds)[0]:
                ray.wait([self._actor.stop.remote()], timeout=KILL_SECONDS)
        with suppress(RayError):
            ray.kill(self._actor)


def start(request: Request) -> RayWorker:
    """Create the actor of a worker; Ray starts it once the cluster has room.

    An actor that waits is what an autoscaler starts hosts for.

    ``ray:cuda:0``: on any host with room.
    ``ray:ADDRESS/cuda:0``: on the host of this address, or of this Ray node id. Ray
    chooses which of a host's devices it gets. Raises
    :class:`~inl.errors.DeviceError`.
    """
    cluster.join_cluster()
    node = cluster.find_node(request.target)
    wanted = cluster.demand(request.device, request.devices)
    cluster.check_demand(wanted, node)
    takes = cluster.shown(wanted)
    comes_later = node is None and cluster.grows()
    if ADDRESS not in os.environ and (comes_later or len(cluster.nodes()) > 1):
        request.listen(show_address(get_node_ip_address(), 0))
    environment = dict(request.environment)
    if request.device != "auto":
        # Its process sees the devices that Ray gave it, and no others.
        environment[DEVICE] = f"{request.device.partition(':')[0]}:0"
    name = f"inl-{request.address}-{request.seat}"
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": wanted.pop("CPU", 0.0),
        "num_gpus": wanted.pop("GPU", 0.0),
        "resources": wanted,
        "max_concurrency": 3,
        "max_restarts": 0,
    }
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            node.node_id, soft=False
        )
    actor = ray.remote(WorkerHost).options(**options).remote(request.seat)
    # As an argument of a call: those of the constructor are stored by the cluster.
    ended = actor.run.remote(tuple(request.arguments), environment)
    return RayWorker(actor, ended, f"{request.seat}, Ray actor {name}", takes)
