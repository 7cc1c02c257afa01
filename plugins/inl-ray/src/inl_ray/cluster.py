"""The Ray cluster of this process: how it is joined, and what it has."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from inl.device import Device, DeviceInfo
from inl.errors import DeviceError

log = logging.getLogger("inl.ray")

NAMESPACE = "inl"
RESOURCES = {"cuda": "GPU", "rocm": "GPU", "xpu": "GPU", "tpu": "TPU"}
"""Ray's resource for one device of a type; of other types a worker takes one CPU."""
TYPES = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu"}
"""Device types by the first word of Ray's accelerator types."""
ID_DIGITS = 8
"""Fewest digits that name a node by the beginning of its id."""
ACCELERATOR = "accelerator_type:"
AUTOSCALER = "INL_RAY_AUTOSCALER"
"""Variable that says whether the cluster starts hosts on demand: 1 or 0."""

_joining = threading.Lock()
"""Held while the process joins a cluster, which it may do once."""


class Node(NamedTuple):
    """A host of the cluster that is alive."""

    node_id: str
    address: str
    resources: Mapping[str, float]


def join_cluster() -> None:
    """Connect this process to a cluster.

    To that of RAY_ADDRESS, else to the one that runs on this host, else to one that is
    started here and ends with this process. Thread-safe: engines start at the same
    time. Raises :class:`~inl.errors.DeviceError`.
    """
    with _joining:
        if not ray.is_initialized():
            _join()


def _join() -> None:
    try:
        ray.init(namespace=NAMESPACE, log_to_driver=True, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise DeviceError(
            f"ray: cannot join a cluster: {error}; accepted: RAY_ADDRESS of one that "
            "runs, `ray start --head` on this host, or neither for one of this process"
        ) from error


def nodes() -> list[Node]:
    """Return the hosts that are alive, in the order of their addresses."""
    found = [
        Node(each["NodeID"], each["NodeManagerAddress"], each["Resources"])
        for each in ray.nodes()
        if each["Alive"]
    ]
    return sorted(found, key=lambda node: (node.address, node.node_id))


def find_node(target: str) -> Node | None:
    """Return the host of that address, or of an id that begins so; ``None``: any.

    Raises :class:`~inl.errors.DeviceError` unless there is exactly one.
    """
    if not target:
        return None
    known = nodes()
    begins = len(target) >= ID_DIGITS
    found = [
        node
        for node in known
        if node.address == target or (begins and node.node_id.startswith(target))
    ]
    if len(found) != 1:
        names = ", ".join(f"{node.address} ({node.node_id[:8]})" for node in known)
        raise DeviceError(
            f"ray:{target}/: found {len(found)} hosts, accepted: nothing for any host, "
            f"or the address or the first 8 digits of the id of one of: {names}"
        )
    return found[0]


def demand(device: str, devices: int = 1) -> dict[str, float]:
    """Return the resources of Ray that a worker on so many devices takes."""
    kind = "cpu" if device == "auto" else str(Device(device).type)
    return {RESOURCES.get(kind, "CPU"): float(devices)}


def grows() -> bool:
    """Whether hosts come on demand; raises :class:`~inl.errors.DeviceError`.

    Ray says nowhere whether an autoscaler runs, so that the environment does.
    """
    found = os.environ.get(AUTOSCALER, "0")
    if found not in ("0", "1"):
        raise DeviceError(f"{AUTOSCALER}: found {found!r:.40}, accepted: 0 or 1")
    return found == "1"


def check_demand(wanted: Mapping[str, float], node: Node | None) -> None:
    """Raise :class:`~inl.errors.DeviceError` if no host has so much in total.

    Where hosts come on demand, ``node`` is the only one that can be too small.
    """
    if node is None and grows():
        return
    known = [node] if node is not None else nodes()
    for each in known:
        if all(
            each.resources.get(name, 0.0) >= count for name, count in wanted.items()
        ):
            return
    found = "; ".join(f"{each.address}: {shown(each.resources)}" for each in known)
    raise DeviceError(
        f"ray: a worker takes {shown(wanted)}, found {found}; accepted: a device that "
        f"a host of the cluster has, or {AUTOSCALER}=1 if hosts are started on demand"
    )


def shown(resources: Mapping[str, float]) -> str:
    """Return counts and names of the resources that workers take."""
    names = [name for name in sorted(resources) if name in ("CPU", *RESOURCES.values())]
    return ", ".join(f"{resources[name]:g} {name}" for name in names) or "nothing"


def devices() -> Sequence[tuple[str, DeviceInfo]]:
    """Return the name and a description of each device of the cluster's hosts."""
    join_cluster()
    return [row for node in nodes() for row in _devices_of(node)]


def _devices_of(node: Node) -> list[tuple[str, DeviceInfo]]:
    memory = int(node.resources.get("memory", 0.0)) or None
    cores = node.resources.get("CPU", 0.0)
    rows = [_row(node, "cpu", f"{cores:g} cores", memory)]
    models = [
        name.removeprefix(ACCELERATOR)
        for name in node.resources
        if name.startswith(ACCELERATOR)
    ]
    name = ", ".join(models) or "accelerator"
    for resource in ("GPU", "TPU"):
        kind = "tpu" if resource == "TPU" else _type_of(name)
        count = int(node.resources.get(resource, 0.0))
        rows += [_row(node, kind, name, None)] * count
    return rows


def _row(node: Node, kind: str, name: str, memory: int | None) -> tuple[str, Any]:
    return f"ray:{node.address}/{kind}:0", DeviceInfo(0, name, memory)


def _type_of(model: str) -> str:
    return TYPES.get(model.split("-")[0], "cuda")
