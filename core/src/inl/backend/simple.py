"""Builds a backend class from a few functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from inl.backend.base import Backend, C, DeviceMemory, Program, StateSpec, Traits
from inl.backend.host import host_memory
from inl.backend.programs import takes_info
from inl.dtypes import E4M3, HostArray, cast, wrap
from inl.errors import OutOfMemory
from inl.ops.step import empty_tables
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.step import Bucket

if TYPE_CHECKING:
    from inl.device import Device
    from inl.spec.program import ProgramInfo

Compile = Callable[..., Program]
Capabilities = Sequence[object] | Callable[["Device"], Sequence[object]]


def simple_backend(
    *,
    tensor: Callable[[HostArray], Any],
    numpy: Callable[[Any], HostArray],
    kernels: Callable[[], Iterable[Kernel]],
    compile: Compile | None = None,  # noqa: A002
    buckets: Callable[[Limits], Sequence[Bucket]] | None = None,
    traits: Traits | None = None,
    memory: Callable[[], DeviceMemory] = host_memory,
    message: Callable[[HostArray], Any] | None = None,
    state: Callable[[StateSpec, Limits], State] | None = None,
    capabilities: Capabilities = (),
) -> Callable[[Device], Backend]:
    """Return a backend class that calls the given functions.

    tensor: copies a host array to the device. numpy: copies a tensor to the host.
    kernels: lists the kernels, at least one for each primitive op of the models.
    compile: ``(function, bucket, consumes)`` -> program; default: the function. One
    with a fourth parameter ``info`` gets the :class:`~inl.spec.program.ProgramInfo`.
    buckets: ``limits`` -> buckets; by default every exact size is served. message:
    converts a step's frame to the argument of its program; default: ``tensor``. state:
    ``(spec, limits)`` -> zeroed state; by default ``tensor`` copies zeros, and caches
    have the layout :class:`~inl.spec.cache.Cache`. capabilities: objects that
    ``offers`` returns by type, or a function of the device that returns them.
    """
    class_traits = traits or Traits()
    compile_takes_info = compile is not None and takes_info(compile)

    @final
    class SimpleBackend(Backend):
        traits = class_traits

        def __init__(self, device: Device) -> None:
            self.device = device
            offered = capabilities(device) if callable(capabilities) else capabilities
            self._capabilities = tuple(offered)

        def tensor(self, data: HostArray) -> Any:
            with _in_memory(f"a tensor of {data.dtype}{list(data.shape)}"):
                return tensor(data)

        def message(self, data: HostArray) -> Any:
            return message(data) if message else tensor(data)

        def numpy(self, x: Any) -> HostArray:
            return numpy(x)

        def state(self, spec: StateSpec, *, limits: Limits) -> State:
            if state is None:
                return plain_state(spec, limits, tensor)
            with _in_memory(_blocks_of(limits)):
                return state(spec, limits)

        def memory(self) -> DeviceMemory:
            return memory()

        def kernels(self) -> Iterable[Kernel]:
            return kernels()

        def buckets(self, limits: Limits) -> Sequence[Bucket]:
            return buckets(limits) if buckets else ()

        def compile(
            self,
            function: Program,
            bucket: Bucket | None,
            *,
            consumes: Sequence[int],
            info: ProgramInfo,
        ) -> Program:
            if compile is None:
                return function
            more = {"info": info} if compile_takes_info else {}
            return compile(function, bucket, consumes, **more)

        def offers(self, kind: type[C]) -> C | None:
            return next((x for x in self._capabilities if isinstance(x, kind)), None)

    return SimpleBackend


@contextmanager
def _in_memory(what: str) -> Iterator[None]:
    """Translate the error of host memory, in which a minimal backend computes."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"{what} does not fit: {error}") from error


def _blocks_of(limits: Limits) -> str:
    return f"a state of {max(limits.blocks, default=0):,} blocks"


def plain_state(
    spec: StateSpec, limits: Limits, tensor: Callable[[HostArray], Any]
) -> State:
    """Return zeroed state in the default layout; ``tensor`` copies each buffer."""
    import numpy as np

    def zeros(shape: tuple[int, ...], dtype: str) -> Any:
        if dtype == "int32":
            return tensor(wrap(np.zeros(shape, np.int32)))
        # The bodies of ops round to numbers of float8, which they store as float32.
        dtype = "float32" if dtype == E4M3 else dtype
        return tensor(cast(np.zeros(shape, np.float32), dtype))

    return zeroed_state(spec, limits, zeros, tensor)


def zeroed_state(
    spec: StateSpec,
    limits: Limits,
    zeros: Callable[[tuple[int, ...], str], Any],
    tensor: Callable[[HostArray], Any] | None = None,
    cache: Callable[[Paged, int, int], Any] | None = None,
    parts: Callable[[Paged, int, int], tuple[Any, Any]] | None = None,
) -> State:
    """Return zeroed state, allocated by ``zeros(shape, dtype name)``.

    tensor: copies the scales of caches in float8_e4m3. cache: (group, layer, blocks) ->
    the cache of a layer; by default one in the default layout, whose keys and values
    ``parts`` may allocate.
    """

    def plain(group: Paged, layer: int, blocks: int) -> Cache:
        import numpy as np

        shape = (blocks, limits.block_size, group.kv_heads, group.head_dim)
        if parts:
            made = Cache(*parts(group, layer, blocks))
        else:
            made = Cache(zeros(shape, group.dtype), zeros(shape, group.dtype))
        if group.dtype == E4M3 and tensor is not None:
            factors = np.array(group.layer_scales()[layer], np.float32)
            made = made._replace(scales=tensor(wrap(factors)))
        return made

    with _in_memory(_blocks_of(limits)):
        return _filled_state(spec, limits, zeros, cache or plain)


def _filled_state(
    spec: StateSpec,
    limits: Limits,
    zeros: Callable[[tuple[int, ...], str], Any],
    make: Callable[[Paged, int, int], Any],
) -> State:
    paged = [item for item in spec if isinstance(item, Paged)]
    caches = {
        layer: make(group, layer, blocks)
        for group, blocks in zip(paged, limits.blocks, strict=True)
        for layer in group.layers
    }
    slotted = {
        item.name: zeros((limits.slots, *item.shape), item.dtype)
        for item in spec
        if isinstance(item, Slotted)
    }
    tables = empty_tables(
        groups=limits.groups,
        slots=limits.slots,
        max_blocks_per_seq=limits.max_blocks_per_seq,
        vocab=limits.penalty_vocab,
        zeros=zeros,
    )
    return State(
        caches=tuple(caches[layer] for layer in sorted(caches)),
        slotted=slotted,
        tables=tables,
    )
