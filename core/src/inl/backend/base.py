"""Backend interface: a few methods, stable within a major contract version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inl.backend.collectives import Collectives as Collectives
from inl.backend.collectives import Rank as Rank
from inl.backend.collectives import Ranks as Ranks
from inl.spec.cache import Paged, Slotted, State
from inl.spec.limits import TOKEN_BUDGET, Limits
from inl.spec.step import Array, Bucket

if TYPE_CHECKING:
    from inl.device import Device
    from inl.dtypes import HostArray
    from inl.spec.kernel import Kernel
    from inl.spec.program import ProgramInfo

C = TypeVar("C")

StateSpec = tuple[Paged | Slotted, ...]
Program = Callable[..., tuple[Any, ...]]


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes."""

    total: int
    free: int


class Traits(NamedTuple):
    """Static properties of a backend, read before any of its methods is called."""

    dtypes: tuple[str, ...] = ("float32",)
    """Supported compute dtypes, the preferred one first."""
    block_size: int = 16
    """Preferred number of tokens per cache block."""
    depth: int = 2
    """Recommended number of steps in flight."""
    decode_steps: int = 1
    """Recommended number of decoding steps between two answers to the host."""
    kv_dtypes: tuple[str, ...] = ()
    """Additional dtypes of the key-value cache, available with every compute dtype."""
    token_budget: int = TOKEN_BUDGET
    """Default for the maximum number of tokens per step."""
    readers: int = 1
    """Number of threads that load weight groups in parallel. Each calls the kernels'
    ``pack`` and the backend's ``tensor``."""
    cache_share: float = 0.25
    """Share of the free memory for the caches of an engine whose config sets none. For
    memory that only the engine uses, close to 1: the engine then leaves room for its
    programs."""
    max_batch: int = 8
    """Default for the maximum number of sequences that run at the same time."""


class Precompiler(NamedTuple):
    """Capability: compiles the kernels of several programs in parallel."""

    precompile: Callable[[Sequence[Callable[[], Any]]], object]
    """Takes calls that each compute a dummy (padding-only) step. It may run them, on
    state that it writes in place, and does not raise: an error recurs in the real step.
    """


class ContextLengths(NamedTuple):
    """Capability: steps are compiled for several context lengths.

    A program with static shapes gathers as many keys as its block table has columns.
    With this capability the runner compiles a program for each length that occurs, and
    selects the smallest that holds the longest sequence of a step.
    """

    lengths: Callable[[Limits], Sequence[int]]
    """Takes the limits and returns lengths in tokens. Each is rounded up to whole
    blocks; the length of the whole table is added."""


class WeightUpdates(NamedTuple):
    """Capability: replaces the contents of a weight while programs are in use.

    For adapters that are loaded while an engine serves. Without it new tensors are
    made, and programs are compiled again.
    """

    replace: Callable[[Array, HostArray], Array]
    """Takes a tensor of :meth:`Backend.tensor` and new data of its shape and dtype.
    Returns the same tensor, overwritten in the order of the device's work, or another
    one that the compiled programs accept in its place."""


class CachedMemory(NamedTuple):
    """Capability: returns device memory to other processes when a runner is closed.

    For backends whose allocator keeps what is freed. Without it the memory of a closed
    runner may stay with this process, for its next one.
    """

    release: Callable[[], None]
    """Frees what no tensor uses. Called after the runner has dropped its own."""


class CacheBytes(NamedTuple):
    """Capability: says how much memory a cache takes in the backend's layout.

    For layouts with padding, or with scales of their own. Without it a cache takes the
    bytes of its keys and values in their dtype, and in int8 those of a float32 scale
    per token and head.
    """

    block_bytes: Callable[[Paged, int], int]
    """Takes a cache group and the tokens per block; returns the bytes of a block in one
    layer, with scales and padding."""


class ForkSafety(NamedTuple):
    """Capability: tensors and programs can also be used in a forked child.

    For backends in host memory without threads of their own, or that start their
    threads again (see :func:`inl.forks.on_fork`). Without it an engine that was opened
    before a fork refuses to compute in the child.
    """


class Backend(ABC):
    """One device: memory, kernels and program compilation.

    Subclasses are final; wrap one to change a method. Optional features are
    capabilities, see :meth:`offers`.
    """

    device: Device
    traits: Traits

    @abstractmethod
    def tensor(self, data: HostArray) -> Array:
        """Copy a host array to the device.

        Raises :class:`~inl.errors.OutOfMemory`.
        """

    def message(self, data: HostArray) -> Array:
        """Convert a step's message to the argument of a program that consumes ``(2,)``.

        A device tensor by default; a backend whose programs copy the message themselves
        may return another object.
        """
        return self.tensor(data)

    @abstractmethod
    def numpy(self, x: Array) -> HostArray:
        """Wait for ``x`` and copy it to the host."""

    @abstractmethod
    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        """Allocate zeroed caches, slots and tables for ``limits``.

        Raises :class:`~inl.errors.OutOfMemory`.
        """

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return the current total and free memory."""

    @abstractmethod
    def kernels(self) -> Iterable[Kernel]:
        """List the kernels of this backend."""

    @abstractmethod
    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        """Choose the buckets to compile, smallest first; empty compiles exact sizes."""

    @abstractmethod
    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],
        info: ProgramInfo,
    ) -> Program:
        """Compile a function to a program with the same parameters and results.

        consumes: positions of arguments whose buffers the program may overwrite; the
        caller does not use them again, and nothing else refers to them during a call.
        bucket: ``None`` for a program that runs between steps: token biases, or the
        admission of n sequences or a copy of n blocks in one call. With buckets, n is 1
        or 16; without, any number up to 16. info: name, limits and context of the
        program.

        A call of the program raises :class:`~inl.errors.OutOfMemory` only while it
        still has the state that it was given; the runner continues with it.
        """

    def offers(self, kind: type[C]) -> C | None:  # noqa: ARG002
        """Return the capability of this type, or ``None`` if it is not supported."""
        return None


class StorageDtypes(NamedTuple):
    """Capability: opens the backend in another dtype.

    For backends whose tensors do not carry a dtype, such as the reference backend.
    """

    dtypes: tuple[str, ...]
    """Supported dtypes."""
    storing: Callable[[str], Backend]
    """Opens the same device with one dtype, the only one in its traits."""


class PackedKernels(NamedTuple):
    """Capability: kernels of packed weights that save memory, but may take more time.

    They are offered beside :meth:`Backend.kernels` for a model that is quantized while
    it is loaded.
    """

    kernels: Callable[[], Iterable[Kernel]]
    """Returns the kernels."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a capability that contract 1 had here, and contract 2 leaves out."""
        if name in ("DeviceLoops", "WholeModels", "DecodedBlocks"):
            from inl.backend import provisional

            return getattr(provisional, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
