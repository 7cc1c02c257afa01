"""Sums and concatenations over the processes of a group, through torch.distributed.

Small sums of GPUs that map one another's memory are one kernel, which reads all parts
(torch's symmetric memory). Others are gathered and then added in the order of the
ranks: a message of a decoding step is so small that only the number of exchanges
counts, and that is one. Every rank has the same bits, whatever else is in the batch.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from functools import reduce
from typing import Any, final

import torch
from torch import distributed

from inl.backend.base import Collectives, Rank
from inl.errors import BackendUnavailable, RunnerError

LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""What torch's process groups speak on each kind of device."""

GATHER: Any = (
    getattr(distributed, "all_gather_single", None)
    or distributed.all_gather_into_tensor
)
"""Gathers into one tensor; the second is its name before torch 2.13."""

PAIR = 2
"""Ranks among which a gathered sum moves no more bytes than any other."""

GATHERED = 1 << 20
"""Bytes of a sum over more ranks from which on the library's own moves fewer."""


MAPPED = 1 << 18
"""Bytes of memory that every GPU of a group maps, for sums of no more than that."""

VECTOR = 16
"""Bytes of which such a sum's size must be a multiple."""


@final
class ProcessCollectives(Collectives):
    """One rank of a group of processes, on ``place``; joins in its constructor.

    Raises :class:`RunnerError` where the others do not come in time.
    """

    def __init__(self, rank: Rank, place: torch.device) -> None:
        library = LIBRARIES.get(place.type)
        if library is None or not distributed.is_backend_available(library):
            raise BackendUnavailable(
                f"{place}: torch {torch.__version__} has no collectives for it; "
                f"accepted: tensor_parallel=1, or one of {', '.join(LIBRARIES)}"
            )
        self.ranks = rank.ranks
        self.invariant = rank.ranks <= PAIR
        try:
            distributed.init_process_group(
                library,
                store=distributed.FileStore(rank.meeting, rank.ranks),  # type: ignore[attr-defined]
                rank=rank.number,
                world_size=rank.ranks,
                timeout=timedelta(seconds=rank.seconds),
                device_id=None if place.type == "cpu" else place,
            )
        except (RuntimeError, ValueError) as error:
            raise RunnerError(
                f"rank {rank.number} of {rank.ranks} on {place}: cannot join the "
                f"group: {error}"
            ) from error
        # A runner's end comes before: its programs talk to the other ranks.
        atexit.register(distributed.destroy_process_group)
        self._mapped: torch.Tensor | None = None
        mapped = map_memory(place)
        able = torch.tensor([mapped is not None], dtype=torch.int32, device=place)
        if bool(self._gathered(able).all()):
            self._mapped = mapped

    def size(self, axis: str) -> int:  # noqa: ARG002
        return self.ranks

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:  # noqa: ARG002
        if self._mapped is not None and _is_mappable(x):
            buffer = self._mapped[: x.nbytes].view(x.dtype).view(x.shape)
            total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
                buffer, x.contiguous(), "sum", everyone()
            )
            return total
        if self.ranks > PAIR and x.nbytes > GATHERED:
            total = x.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(total)
            return total
        return reduce(torch.add, self._gathered(x).unbind(0))

    def all_gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:  # noqa: ARG002
        return torch.cat(self._gathered(x).unbind(0), -1)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``: [ranks, *x.shape]. As bytes, so of any dtype."""
        x = x.contiguous()
        found = torch.empty((self.ranks, *x.shape), dtype=x.dtype, device=x.device)
        GATHER(found.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
        return found


def everyone() -> Any:
    """Name of the group that was joined."""
    assert distributed.group.WORLD is not None, "joined in the constructor"
    return distributed.group.WORLD.group_name


def map_memory(place: torch.device) -> torch.Tensor | None:
    """Bytes that all GPUs of the group map; ``None`` where this one cannot."""
    if place.type != "cuda":
        return None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        torch.ops.symm_mem.one_shot_all_reduce_copy  # noqa: B018 - since torch 2.7
        buffer: torch.Tensor = symmetric.empty(MAPPED, dtype=torch.uint8, device=place)
        symmetric.rendezvous(buffer, everyone())
    except (AttributeError, ImportError, RuntimeError):
        return None
    return buffer


def _is_mappable(x: torch.Tensor) -> bool:
    known = x.dtype in (torch.bfloat16, torch.float32)
    return known and x.nbytes <= MAPPED and x.nbytes % VECTOR == 0
