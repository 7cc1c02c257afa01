"""Collectives over a group of processes, through torch.distributed.

Small sums on GPUs that map each other's memory are one kernel that reads the buffers of
all ranks (torch's symmetric memory). Other sums are gathered, then added in the order
of the ranks: tensors of a decoding step are so small that only the number of exchanges
matters, which is one. Results are bitwise equal on all ranks and do not depend on the
batch.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, final

import torch
from torch import distributed

from inl.backend.collectives import EXPERT, TENSOR, Collectives, Rank
from inl.backend.rank_sockets import split_address
from inl.errors import BackendUnavailable, RunnerError
from inl.spec.op import Spec
from inl_torch.backend import PAIR
from inl_torch.tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inl.device import Device

LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""Device type -> backend of torch's process group."""

GATHER: Any = (
    getattr(distributed, "all_gather_single", None)
    or distributed.all_gather_into_tensor
)
"""Gathers into one tensor; the second name is that before torch 2.13."""

MAX_GATHERED_BYTES = 1 << 20
"""Bytes of a sum over more ranks above which the library's all-reduce is used, which
then moves fewer bytes."""

MAPPED_BYTES = 1 << 18
"""Bytes of the buffer that every GPU of a group maps: the largest sum through it."""

VECTOR_BYTES = 16
"""The size of such a sum must be a multiple of this."""


@final
class ProcessCollectives(Collectives):
    """Collectives of one rank on ``place``; the constructor joins the process groups.

    One group has all ranks, and each axis has one for every line of ranks along it.
    device: the name in messages; torch names AMD's GPUs as NVIDIA's. Raises
    :class:`BackendUnavailable` where torch has no collectives for the device, and
    :class:`RunnerError` where the group cannot be joined in time.
    """

    def __init__(
        self, rank: Rank, place: torch.device, device: Device | None = None
    ) -> None:
        library = require_library(place, device or place)
        self.rank = rank
        self.invariant = rank.ranks <= PAIR
        try:
            distributed.init_process_group(
                library,
                store=_store(rank),
                rank=rank.number,
                world_size=rank.ranks,
                timeout=timedelta(seconds=rank.seconds),
                device_id=None if place.type == "cpu" else place,
            )
            self._groups = _groups(rank)
        except (RuntimeError, ValueError) as error:
            raise RunnerError(
                f"rank {rank.number} of {rank.ranks} on {device or place}: cannot join "
                f"the group: {error}"
            ) from error
        self._mapped: dict[str, torch.Tensor] = {}
        """Buffer of sums along an axis, if its GPUs map each other's memory."""
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        """Messages that have not been received, and their memory."""
        self._flag = torch.zeros(1, dtype=torch.int32, device=place)
        for axis in (TENSOR, EXPERT):
            if self.size(axis) == 1:
                continue
            mapped = map_memory(place, self._groups[axis])
            supported = torch.full_like(self._flag, mapped is not None)
            if bool(self._gathered(supported, axis).all()) and mapped is not None:
                self._mapped[axis] = mapped

    def size(self, axis: str) -> int:
        return self.rank.size(axis)

    def index(self, axis: str) -> int:
        return self.rank.position(axis)

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        size = self.size(axis)
        if size == 1:
            return x
        if axis in self._mapped and _is_mappable(x):
            buffer = self._mapped[axis][: x.nbytes].view(x.dtype).view(x.shape)
            total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
                buffer, x.contiguous(), "sum", self._groups[axis].group_name
            )
            return total
        if size > PAIR and x.nbytes > MAX_GATHERED_BYTES:
            total = x.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(total, group=self._groups[axis])
            return total
        return reduce(torch.add, self._gathered(x, axis).unbind(0))

    def all_gather(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        if self.size(axis) == 1:
            return x
        return torch.cat(self._gathered(x, axis).unbind(0), -1)

    def gather_rows(
        self, parts: Sequence[torch.Tensor], axis: str
    ) -> tuple[torch.Tensor, ...]:
        size, count = self.size(axis), parts[0].shape[0]
        if size == 1:
            return tuple(parts)
        rows = [x.contiguous().view(count, -1).view(torch.uint8) for x in parts]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        gathered = self._gathered(joined, axis).view(size * count, -1)
        found = torch.split(gathered, [row.shape[1] for row in rows], 1)
        return tuple(
            part.contiguous().view(x.dtype).view(size * count, *x.shape[1:])
            for part, x in zip(found, parts, strict=True)
        )

    def all_to_all(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        self._rows(x, axis, "all_to_all")
        if self.size(axis) == 1:
            return x
        x = x.contiguous()
        parts = torch.empty_like(x)
        group = self._groups[axis]
        distributed.all_to_all_single(_bytes(parts), _bytes(x), group=group)
        return parts

    def send(self, x: torch.Tensor, axis: str, target: int) -> None:
        peer = self.rank.peers(axis)[target]
        if x.device.type != "cpu":
            distributed.send(_bytes(x.contiguous()), peer)  # waits on the device alone
            return
        copy = _bytes(x.clone(memory_format=torch.contiguous_format))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        self._sending.append((distributed.isend(copy, peer), copy))

    def recv(self, spec: Spec, axis: str, source: int) -> torch.Tensor:
        dtype, place = torch_dtype(spec.dtype), self._flag.device
        x = torch.empty(spec.shape, dtype=dtype, device=place)
        distributed.recv(_bytes(x), self.rank.peers(axis)[source])
        return x

    def barrier(self, axis: str) -> None:
        if self.size(axis) > 1:
            self._gathered(self._flag, axis).cpu()

    def _gathered(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """Gather ``x`` of every rank: [ranks, *x.shape]. As bytes, for any dtype."""
        shape = self.size(axis), *x.shape
        parts = torch.empty(shape, dtype=x.dtype, device=x.device)
        GATHER(_bytes(parts), _bytes(x.contiguous()), group=self._groups[axis])
        return parts


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as its bytes."""
    return x.view(-1).view(torch.uint8)


def _store(rank: Rank) -> Any:
    """Open the store at which ranks find each other; rank 0 serves it."""
    host, port = split_address(rank.address)
    timeout = timedelta(seconds=rank.seconds)
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, rank.ranks, rank.number == 0, timeout
    )


def _groups(rank: Rank) -> dict[str, Any]:
    """Return this rank's group along each axis; every rank makes all of them."""
    groups: dict[str, Any] = {}
    for axis, size in rank.grid.items():
        if size == rank.ranks:
            groups[axis] = distributed.group.WORLD
        elif size > 1:
            lines = {rank._replace(number=n).peers(axis) for n in range(rank.ranks)}
            made = {line: distributed.new_group(list(line)) for line in sorted(lines)}
            groups[axis] = made[rank.peers(axis)]
    return groups


def require_library(place: torch.device, device: Device | torch.device) -> str:
    """Return the name by which torch knows the library that exchanges tensors.

    device: the name in messages. Raises :class:`BackendUnavailable` where torch
    has none for this device, or is built without it. "nccl" is RCCL in torch's ROCm
    build.
    """
    library = LIBRARIES.get(place.type)
    if library is None:
        raise BackendUnavailable(
            f"{device}: torch has no collectives for {place.type}; accepted: "
            f"tensor_parallel=1, or one of {', '.join(LIBRARIES)}"
        )
    if not distributed.is_backend_available(library):
        is_rccl = library == "nccl" and torch.version.hip is not None
        name = "RCCL" if is_rccl else library.upper()
        raise BackendUnavailable(
            f"{device}: torch {torch.__version__} is built without {name}, over which "
            "ranks exchange tensors; accepted: tensor_parallel=1, or a build with it"
        )
    return library


def map_memory(place: torch.device, group: Any) -> torch.Tensor | None:
    """Allocate a buffer mapped by all GPUs of the group; ``None`` if not supported."""
    if place.type != "cuda":
        return None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        torch.ops.symm_mem.one_shot_all_reduce_copy  # noqa: B018 - since torch 2.7
        buffer: torch.Tensor = symmetric.empty(
            MAPPED_BYTES, dtype=torch.uint8, device=place
        )
        symmetric.rendezvous(buffer, group.group_name)
    except (AttributeError, ImportError, RuntimeError):
        return None
    return buffer


def _is_mappable(x: torch.Tensor) -> bool:
    has_kernel = x.dtype in (torch.bfloat16, torch.float32)
    return has_kernel and x.nbytes <= MAPPED_BYTES and x.nbytes % VECTOR_BYTES == 0
