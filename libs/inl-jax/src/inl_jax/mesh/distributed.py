"""Processes, one on each host, whose devices form one mesh."""

from __future__ import annotations

import jax

from inl.backend.collectives import Rank
from inl.device import Device
from inl.errors import BackendUnavailable, RunnerError
from inl.placement.placement import Placement


def join(rank: Rank, platform: str) -> None:
    """Join the processes of all ranks. JAX must not have made its devices yet.

    Rank 0 serves the others at the rank's address. Raises
    :class:`~inl.errors.RunnerError` where they do not answer in time.
    """
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            rank.address,
            rank.ranks,
            rank.number,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(rank.seconds)),
            # By default it would listen on all interfaces.
            coordinator_bind_address=rank.address,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RunnerError(
            f"rank {rank.number} of {rank.ranks} at {rank.address}: JAX cannot join "
            f"the hosts: {reason}"
        ) from error


def devices_of_hosts(
    first: Device, platform: str, sizes: Placement, rank: Rank
) -> list[jax.Device]:
    """Return the devices of a mesh: an equal number of each host, in their order.

    first: the first one of each host. Raises
    :class:`~inl.errors.BackendUnavailable` where a host has fewer, and where the
    platform numbers the hosts in another order than that of the ranks.
    """
    count = sizes.count // sizes.hosts
    found = jax.devices(platform)
    own = jax.process_index(platform)
    if own != rank.number:
        raise BackendUnavailable(
            f"{first}: rank {rank.number} is host {own} of the {platform}s; start each "
            f"host's worker with its own number: --seat {own} here"
        )
    chosen: list[jax.Device] = []
    for host in range(sizes.hosts):
        devices = [each for each in found if each.process_index == host][first.index :]
        if len(devices) < count:
            raise BackendUnavailable(
                f"{first}: placement {sizes} needs {count} devices of each host; JAX "
                f"finds {len(devices)} of platform {platform} from this one on at rank "
                f"{host}"
            )
        chosen += devices[:count]
    return chosen
