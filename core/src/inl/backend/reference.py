"""NumPy reference backend: every op runs its body. Slow; used as the oracle in tests.

Consumed buffers are filled with NaN or a marker value and made read-only, so that use
after donation fails on every machine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import numpy as np

from inl.backend.base import (
    Backend,
    DeviceMemory,
    ForkSafety,
    Program,
    StateSpec,
    StorageDtypes,
    Traits,
)
from inl.backend.collectives import AXES, Collectives, Rank, Ranks
from inl.backend.host import host_memory
from inl.backend.peer_collectives import PeerCollectives
from inl.backend.provisional import DeviceLoops
from inl.backend.rank_sockets import SocketLink
from inl.backend.simple import plain_state
from inl.dtypes import E4M3, FLOATS, HostArray, widen, wrap
from inl.errors import DeviceError, KernelFailed, RunnerError
from inl.ops import catalog
from inl.spec.cache import State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.op import OpSpec
from inl.spec.step import Bucket
from inl.spec.tolerance import round_results
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.device import Device
    from inl.spec.program import ProgramInfo

C = TypeVar("C")
MANY = 1 << 30
"""Ranks of the largest group whose sums are invariant: no group is larger."""
SPOILED = 0x7FBAD000
"""Fills consumed integer buffers."""


@final
class ReferenceBackend(Backend):
    """NumPy on the host: stores in ``dtype`` and computes in float32 or float64."""

    def __init__(
        self,
        device: Device,
        *,
        dtype: str = "float32",
        collectives: Collectives | None = None,
    ) -> None:
        if dtype not in FLOATS:
            raise DeviceError(f"dtype: found {dtype!r}, accepted: {', '.join(FLOATS)}")
        self.device = device
        self.traits = Traits(dtypes=(dtype,), kv_dtypes=(E4M3,))
        self._dtype = dtype
        self._collectives = collectives

    def tensor(self, data: HostArray) -> Any:
        values = widen(data)
        if values.dtype.kind != "f":
            return values.copy()
        return values.astype(np.float64 if self._dtype == "float64" else np.float32)

    def numpy(self, x: Any) -> HostArray:
        return wrap(np.asarray(x))

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        return plain_state(spec, limits, self.tensor)

    def memory(self) -> DeviceMemory:
        return host_memory()

    def kernels(self) -> Iterable[Kernel]:
        for spec in catalog().values():
            if not spec.composite:
                run = self._collective(spec) or body_kernel(spec, self._dtype)
                part = run if spec.name == "expert_linear" else None
                yield Kernel(spec.name, "numpy", run, run_part=part)

    def buckets(self, limits: Limits) -> Sequence[Bucket]:  # noqa: ARG002
        return ()

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,  # noqa: ARG002
        *,
        consumes: Sequence[int],  # noqa: ARG002
        info: ProgramInfo | None = None,  # noqa: ARG002
    ) -> Program:
        return function

    def offers(self, kind: type[C]) -> C | None:
        dtypes = StorageDtypes(FLOATS, self._storing)
        loops = DeviceLoops(while_loop, np)
        ranks = Ranks(self._join, MANY, AXES, in_threads=True)
        capabilities = (self._collectives, dtypes, ForkSafety(), loops, ranks)
        return next((each for each in capabilities if isinstance(each, kind)), None)

    def _join(self, rank: Rank) -> ReferenceBackend:
        collectives = PeerCollectives(rank, SocketLink(rank))
        return ReferenceBackend(self.device, dtype=self._dtype, collectives=collectives)

    def _storing(self, dtype: str) -> ReferenceBackend:
        return ReferenceBackend(self.device, dtype=dtype, collectives=self._collectives)

    def _collective(self, spec: OpSpec) -> Callable[..., Any] | None:
        if self._collectives is None:
            return None
        return {
            "all_reduce": self._collectives.all_reduce,
            "all_gather": self._collectives.all_gather,
        }.get(spec.name)


def while_loop(
    condition: Callable[[Any], Any], body: Callable[[Any], Any], value: Any
) -> Any:
    """Repeat ``body`` while ``condition`` holds."""
    while condition(value):
        value = body(value)
    return value


def body_kernel(spec: OpSpec, dtype: str) -> Callable[..., Any]:
    """Return a kernel that runs the body, rounds results and spoils consumed inputs."""
    return BodyRun(spec, dtype)


@final
class BodyRun:
    """The function of such a kernel. It copies what it consumes."""

    __slots__ = ("_consumed", "_dtype", "_spec")

    def __init__(self, spec: OpSpec, dtype: str) -> None:
        self._spec, self._dtype = spec, dtype
        self._consumed = [spec.parameters.index(name) for name in spec.consumes]

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        spec = self._spec
        for index in self._consumed:
            if not all(array.flags.writeable for array in leaves(args[index])):
                raise KernelFailed(
                    f"{spec.name}: argument {spec.parameters[index]!r} was already "
                    "consumed; pass the state that the consuming op returned"
                )
        result = round_results(spec, spec.body(*args, **attrs), self._dtype, args)
        outputs = list(leaves(result)) if self._consumed else []
        for index in self._consumed:
            for array in leaves(args[index]):
                if not any(np.may_share_memory(array, other) for other in outputs):
                    spoil(array)
        return result


def spoil(array: Any) -> None:
    """Overwrite a consumed array and make it read-only."""
    if not array.size:
        return  # NumPy does not report whether empty arrays share memory
    array.setflags(write=True)
    array.fill(np.nan if array.dtype.kind == "f" else SPOILED)
    array.setflags(write=False)


class ThreadCollectives(PeerCollectives):
    """Collectives between threads of this process.

    axes: of the ranks, see :class:`~inl.backend.collectives.Rank`.
    """

    def __init__(
        self,
        ranks: int,
        rank: int,
        shared: Rendezvous,
        axes: tuple[tuple[str, int], ...] = (),
    ) -> None:
        position = Rank(number=rank, ranks=ranks, axes=axes)
        super().__init__(position, _ThreadLink(rank, shared))


class Rendezvous:
    """Passes arrays between the threads of a rank group."""

    def __init__(self, ranks: int, *, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, int], deque[Any]] = {
            (source, target): deque()
            for source in range(ranks)
            for target in range(ranks)
        }
        self._is_broken = False

    def send(self, x: Any, source: int, target: int) -> None:
        """Queue a copy of ``x``."""
        with self._changed:
            self._messages[source, target].append(np.array(x))
            self._changed.notify_all()

    def recv(self, source: int, target: int) -> Any:
        """Return the next array of a rank.

        Raises :class:`RunnerError` if it does not arrive in time.
        """
        queue = self._messages[source, target]
        with self._changed:
            waiting = self._changed.wait_for(
                lambda: bool(queue) or self._is_broken, self._seconds
            )
            if self._is_broken or not waiting:
                self._break()
                raise RunnerError(f"rank {target}: another rank stopped or timed out")
            return queue.popleft()

    def abort(self) -> None:
        """Make every waiting rank fail."""
        with self._changed:
            self._break()

    def _break(self) -> None:
        self._is_broken = True
        self._changed.notify_all()


class _ThreadLink(NamedTuple):
    """Messages of one rank of a :class:`Rendezvous`."""

    rank: int
    shared: Rendezvous

    def send(self, x: Any, target: int) -> None:
        self.shared.send(x, self.rank, target)

    def recv(self, source: int) -> Any:
        return self.shared.recv(source, self.rank)
