"""What a backend is: a handful of methods, frozen within a contract major."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inl.spec.cache import Paged, Slotted, State
from inl.spec.limits import TOKEN_BUDGET, Limits
from inl.spec.step import Array, Bucket

if TYPE_CHECKING:
    from inl.device import Device
    from inl.dtypes import HostArray
    from inl.spec.kernel import Kernel

C = TypeVar("C")

StateSpec = tuple[Paged | Slotted, ...]
Program = Callable[..., tuple[Any, ...]]


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    total: int
    free: int


class Traits(NamedTuple):
    """What the planner must know of a backend before it asks it for anything."""

    dtypes: tuple[str, ...] = ("float32",)
    """Dtypes it computes in, the preferred one first."""
    block_size: int = 16
    """Tokens per cache block that its attention likes best."""
    depth: int = 2
    """Steps worth having in flight."""
    kv_dtypes: tuple[str, ...] = ()
    """Dtypes of keys and values that may be asked for, whatever it computes in."""
    token_budget: int = TOKEN_BUDGET
    """Most tokens worth computing in one step, unless an engine is told otherwise."""
    readers: int = 1
    """Groups of weights worth reading and laying out at the same time, each by a thread
    of its own, which calls kernels' ``prepare`` and ``tensor``."""


class Precompiler(NamedTuple):
    """How to make ready what several programs need, all at once, before they run."""

    precompile: Callable[[Sequence[Callable[[], Any]]], object]
    """Takes calls, each of which computes a step of nobody. It may run them, on state
    that it writes in place, and raises nothing: what fails will fail when it is meant.
    """


class Backend(ABC):
    """One device. To tweak a method, wrap; to grow the contract, see :meth:`offers`."""

    device: Device
    traits: Traits

    @abstractmethod
    def tensor(self, data: HostArray, *, axis: int | None = None) -> Array:
        """Copy to the device; ``axis`` is cut over ranks where one program drives many.

        Raises :class:`~inl.errors.OutOfMemory`.
        """

    def message(self, data: HostArray) -> Array:
        """What a program that consumes ``(2,)`` takes as its message: a tensor, unless
        the backend's own programs copy it where they want it.
        """
        return self.tensor(data)

    @abstractmethod
    def numpy(self, x: Array) -> HostArray:
        """Wait for ``x`` and copy it to the host."""

    @abstractmethod
    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        """Allocate zeroed caches, slots and tables for ``limits``."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Say how much memory there is now."""

    @abstractmethod
    def kernels(self) -> Iterable[Kernel]:
        """List the kernels that come with this backend."""

    @abstractmethod
    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        """Choose the programs to compile, smallest first; none means any exact size."""

    @abstractmethod
    def compile(
        self, function: Program, bucket: Bucket | None, *, consumes: Sequence[int]
    ) -> Program:
        """Make one program; arguments at ``consumes`` are given up by the caller.

        ``bucket`` is ``None`` for what comes between steps: marks, and the admissions
        of n sequences at once, n being 1 or 16 where there are buckets and any number
        up to 16 otherwise.
        """

    def offers(self, kind: type[C]) -> C | None:  # noqa: ARG002
        """Return a capability of this kind, or ``None``."""
        return None


class Collectives(ABC):
    """Talks to the other ranks of an axis; every rank makes the same calls in order."""

    invariant: bool = False
    """Whether a sum's bits depend on nothing but the ranks' numbers."""

    @abstractmethod
    def size(self, axis: str) -> int:
        """Count the ranks of ``axis``."""

    @abstractmethod
    def all_reduce(self, x: Array, axis: str) -> Array:
        """Sum over the ranks of ``axis``, the same bits on each."""

    @abstractmethod
    def all_gather(self, x: Array, axis: str) -> Array:
        """Concatenate the ranks' parts along the last axis."""


class Rank(NamedTuple):
    """One of several processes that compute a model together."""

    number: int
    """From 0."""
    ranks: int
    meeting: str
    """Path of a file, not there yet, by which they find one another."""
    seconds: float
    """How long to wait for the others."""


class Ranks(NamedTuple):
    """How to open a backend as one rank of several, each in its own process."""

    joining: Callable[[Rank], Backend]
    """Opens the same device once more, offering :class:`Collectives`; returns when
    all ranks have come. Raises :class:`~inl.errors.RunnerError` where they do not."""


class StorageDtypes(NamedTuple):
    """How to open a backend in another dtype, where tensors do not carry theirs."""

    dtypes: tuple[str, ...]
    """Those that it can be opened in."""
    storing: Callable[[str], Backend]
    """Opens the same device with this as the only dtype of its traits."""
