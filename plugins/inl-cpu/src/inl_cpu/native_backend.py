"""CPU backend through the native library: NumPy memory, one library call a step."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np

from inl.backend.bandwidth import Bandwidth
from inl.backend.base import (
    Backend,
    DeviceMemory,
    ForkSafety,
    Program,
    StateSpec,
    Traits,
    WeightUpdates,
)
from inl.backend.block_io import Addresses, host_memory_range
from inl.backend.collectives import AXES, Rank, Ranks
from inl.backend.host import host_memory
from inl.backend.peer_collectives import PeerCollectives
from inl.backend.provisional import DecodedBlocks
from inl.backend.rank_sockets import SocketLink
from inl.backend.simple import zeroed_state
from inl.dtypes import E4M3, SIZES, HostArray, widen, wrap
from inl.errors import DeviceError
from inl.spec.cache import Paged, State
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.step import Bucket
from inl_cpu import blocks, kernels
from inl_cpu.command_emitter import CommandEmitter
from inl_cpu.encoder_program import EncoderProgram
from inl_cpu.instructions import Read
from inl_cpu.kernels.attention import NativeCache
from inl_cpu.library import open_machine
from inl_cpu.memory import empty
from inl_cpu.program import Program as NativeProgram
from inl_cpu.program import RecordedProgram
from inl_cpu.rank_collectives import RecordedCollectives
from inl_cpu.weight_cache import PackedWeightCache

if TYPE_CHECKING:
    from inl.device import Device
    from inl.spec.program import ProgramInfo

C = TypeVar("C")
MANY = 1 << 30
"""Ranks of the largest group whose sums are invariant: no group is larger."""
LOOPBACK = "127.", "[::1]", "localhost:"
UNCHANGED = ("float32", "int32")
"""Dtypes that tensors are stored in as given; others are widened."""


@final
class NativeBackend(Backend):
    """Backend with float32 activations in every dtype.

    "float32" computes exactly with the weights as stored in the file. "bfloat16" rounds
    the inputs of products, for quantized weights to int16 or int8 (see
    :func:`inl_cpu.matrix.input_precision`), and the KV cache.
    Raises :class:`DeviceError` for invalid environment variables.
    """

    traits = Traits(
        dtypes=("bfloat16", "float32"),
        depth=1,
        kv_dtypes=("bfloat16", "float32", "int8", E4M3),
    )

    def __init__(self, device: Device) -> None:
        self.device = device
        self.emitter = CommandEmitter(open_machine())
        self.programs: OrderedDict[NativeProgram, RecordedProgram] = OrderedDict()
        """Recorded programs, the least recently used first."""
        self.collectives: RecordedCollectives | None = None
        """Where this backend is one rank of several."""

    def tensor(self, data: HostArray) -> Any:
        if data.dtype not in SIZES:
            raise DeviceError(
                f"dtype: found {data.dtype!r}, a tensor takes {', '.join(SIZES)}"
            )
        values = widen(data)
        if data.dtype in UNCHANGED:
            return np.array(values)
        floating = values.dtype.kind == "f"
        out = empty(values.shape, np.float32 if floating else values.dtype)
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="same_kind")
        return out

    def message(self, data: HostArray) -> Any:
        return data.data  # a recorded program copies it before it starts

    def numpy(self, x: Any) -> HostArray:
        if isinstance(x, NativeCache):
            return wrap(np.stack([x.k, x.v]))
        return wrap(np.array(x))

    def state(self, spec: StateSpec, *, limits: Limits) -> State:
        self.programs.clear()  # recordings refer to the state of before

        def cache(group: Paged, layer: int, blocks: int) -> NativeCache:
            size = limits.block_size
            return NativeCache(self.emitter, group, layer, blocks, size)

        def zeros(shape: tuple[int, ...], dtype: str) -> Any:
            return np.zeros(shape, dtype if dtype in UNCHANGED else np.float32)

        return zeroed_state(spec, limits, zeros, cache=cache)

    def memory(self) -> DeviceMemory:
        return host_memory()

    def kernels(self) -> Iterable[Kernel]:
        return kernels.kernels(self.emitter)

    def buckets(self, limits: Limits) -> Sequence[Bucket]:  # noqa: ARG002
        return ()

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],
        info: ProgramInfo | None = None,
    ) -> Program:
        if info is not None and info.name == "encode":
            return EncoderProgram(function, self.emitter)
        # Only steps, functions of (weights, message, state), are worth recording.
        if bucket is None or tuple(consumes) != (2,):
            return function
        return NativeProgram(function, self.emitter, self.programs)

    def _join(self, rank: Rank) -> NativeBackend:
        twin, peers = copy(self), PeerCollectives(rank, SocketLink(rank))
        on_this_host = rank.address.startswith(LOOPBACK)
        twin.emitter = CommandEmitter(open_machine(rank.ranks if on_this_host else 1))
        twin.programs = OrderedDict()
        twin.collectives = RecordedCollectives(twin.emitter, peers)
        return twin

    def offers(self, kind: type[C]) -> C | None:
        offers = (
            self.collectives,
            Ranks(self._join, MANY, AXES),
            ReadBandwidth(self.emitter),
            PackedWeightCache(self.emitter),
            WeightUpdates(_overwritten),
            ForkSafety(),
            DecodedBlocks(),
            blocks.BLOCK_IO,
            Addresses(host_memory_range),
        )
        return next((each for each in offers if isinstance(each, kind)), None)


def _overwritten(tensor: Any, data: HostArray) -> Any:
    """Copy new data into a tensor, which recorded programs refer to."""
    np.copyto(tensor, widen(data))
    return tensor


class ReadBandwidth(Bandwidth):
    """Measures memory bandwidth: the pool reads a buffer larger than any cache."""

    BYTES = 256 << 20
    TRIES = 4

    def __init__(self, emitter: CommandEmitter) -> None:
        self._emitter = emitter

    def bytes_per_second(self) -> float:
        size = min(self.BYTES, host_memory().free // 8)
        source, checksum = np.ones(size, np.uint8), np.zeros(1, np.uint64)
        best = float("inf")
        for _ in range(self.TRIES):
            start = time.perf_counter()
            self._emitter.emit(Read(bytes=size, x=source, y=checksum))
            best = min(best, time.perf_counter() - start)
        return size / best
