"""Copies blocks and slots of a model's state to and from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.block_io import (
    BlockIO,
    Blocks,
    SlotIO,
    composed_blocks,
    composed_slots,
    plain_memory,
)
from inl.backend.programs import compile_program, info_of
from inl.dtypes import E4M3, HostArray, cast, encoded_e4m3, widen, wrap
from inl.errors import NoKernel, RunnerError
from inl.executor.tracing import strict_state
from inl.spec.cache import Cache, Paged, Slotted, State
from inl.spec.cache_layout import (
    BITS,
    BLOCKS,
    SLOT_GROUP,
    BlockLayout,
    CacheLayout,
    Part,
    Parts,
    copied,
    divided,
    joined,
)
from inl.spec.dispatch import ResolvedOps, Tracer
from inl.spec.message import MAX_TRANSFER
from inl.spec.step import Bucket
from inl.spec.strict_array import StrictArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.backend.base import Backend, StateSpec
    from inl.spec.limits import Limits
    from inl.spec.selection import KernelSelection

ROW = (0, 1, 1, 1, 1)
"""What follows the slot in the argument ``row`` of :class:`SlotIO`."""


class CacheTransfers:
    """Copies contents of a state, given to each call, that a backend has allocated.

    spec: of the state, on one rank. state: such a state, whose layout is looked up.
    Programs are compiled when first needed.
    """

    def __init__(
        self, backend: Backend, selection: KernelSelection, spec: StateSpec,
        limits: Limits, state: State,
    ) -> None:  # fmt: skip
        self._backend, self._selection = backend, selection
        self._spec, self._limits = spec, limits
        paged = [item for item in spec if isinstance(item, Paged)]
        layers = sorted(layer for group in paged for layer in group.layers)
        # A state has a cache for each layer with attention; others have no number.
        self._groups = [
            group._replace(layers=tuple(map(layers.index, group.layers)))
            for group in paged
        ]
        self._slotted = tuple(item for item in spec if isinstance(item, Slotted))
        self._is_plain = all(isinstance(cache, Cache) for cache in state.caches)
        self._programs: dict[tuple[str, int], Callable[..., Any]] = {}

    @cached_property
    def refusal(self) -> str:
        """Why nothing can be copied; empty if it can."""
        device = self._backend.device
        try:
            if self._block_io is None:
                return f"{device}: offers no BlockIO for the layout of its caches"
            if self._slotted and self._slot_io is None:
                return f"{device}: offers no SlotIO"
        except NoKernel as error:
            return f"{device}: offers no BlockIO or SlotIO, and {error}"
        return ""

    @cached_property
    def layout(self) -> CacheLayout | None:
        """Layout of the contents; ``None`` if they cannot be copied."""
        if self.refusal:
            return None
        size = self._limits.block_size
        groups = tuple(BlockLayout.of(group, size) for group in self._groups)
        return CacheLayout(groups, self._slotted)

    def read(self, state: State, group: int, ids: Sequence[int]) -> Any:
        """Begin to copy blocks of a group, or a slot; returns what :meth:`host` takes.

        Does not wait for the device.
        """
        self._check()
        name = "read_slot" if group == SLOT_GROUP else "read_blocks"
        arguments = self._backend.tensor(wrap(self._ids(group, ids)))
        (found,) = self._program(name, group)(arguments, state)
        if group == SLOT_GROUP or self._io.to_host is None:
            return found
        return found._replace(cells=self._io.to_host(found.cells, len(ids)))

    def host(self, group: int, count: int, found: Any) -> Parts:
        """Wait for the result of :meth:`read` of ``count`` blocks."""
        layout = self.layout
        assert layout is not None, "something was read"
        parts = layout.parts(group, count)
        if group == SLOT_GROUP:
            return {name: self._host(found[name], part) for name, part in parts.items()}
        if self.reads_blocks:
            blocks = self.host_blocks(group, count, found)
            return joined(blocks, BLOCKS, empty=self._io.empty)
        tensors = {"cells": found.cells, "scales": found.scales}
        if self._groups[group].dtype == E4M3:
            cells = self._host(found.cells, parts["cells"])
            return {"cells": cells, "scales": self._constant_scales(group)}
        return {name: self._host(tensors[name], part) for name, part in parts.items()}

    def host_blocks(self, group: int, count: int, found: Any) -> list[Parts]:
        """Wait as :meth:`host`; returns the contents of each block, in own memory."""
        layout = self.layout
        assert layout is not None, "something was read"
        part = layout.groups[group].parts(1)["cells"]
        cells = [
            array
            if array.dtype == part.dtype
            else HostArray(_bits(array, part.dtype), *part)
            for array in found.cells()
        ]
        if "scales" not in layout.groups[group].parts(1):
            return [{"cells": each} for each in cells]
        if self._groups[group].dtype == E4M3:
            scales = [self._constant_scales(group)] * count
        else:
            part = layout.groups[group].parts(count)["scales"]
            whole = {"scales": self._host(found.scales, part)}
            scales = [copied(each)["scales"] for each in divided(whole, count, BLOCKS)]
        return [
            {"cells": each, "scales": own}
            for each, own in zip(cells, scales, strict=True)
        ]

    def _constant_scales(self, group: int) -> HostArray:
        """Return the part "scales" of float8_e4m3."""
        layout = self.layout
        assert layout is not None, "something was read"
        constants = np.array(layout.groups[group].scales, np.float32)
        return wrap(constants.reshape(layout.groups[group].parts(1)["scales"].shape))

    def release(self) -> None:
        """Drop programs, and memory for contents that the backend has allocated."""
        self._programs.clear()
        self.__dict__.pop("_block_io", None)

    @property
    def reads_blocks(self) -> bool:
        """Whether blocks that are read come in memory of their own."""
        return self._io.to_host is not None

    @property
    def writes_blocks(self) -> bool:
        """Whether blocks are copied to the device one by one."""
        return self._io.from_host is not None

    @property
    def has_own_memory(self) -> bool:
        """Whether :meth:`host_array` allocates memory that is copied faster."""
        return not self.refusal and self._io.empty is not plain_memory

    @property
    def _io(self) -> BlockIO:
        assert self._block_io is not None, "there is no refusal"
        return self._block_io

    def host_array(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Allocate an array for contents of blocks, see :class:`BlockIO`."""
        return self._io.empty(shape, dtype)

    def write(
        self, group: int, ids: Sequence[int], each: Sequence[Parts]
    ) -> tuple[Callable[..., tuple[State]], Any, Any]:
        """Return a program that overwrites blocks of a group, or a slot.

        With its arguments before the state, which it consumes. each: checked contents,
        of all blocks or of each one.
        """
        self._check()
        arguments = self._backend.tensor(wrap(self._ids(group, ids)))
        if group == SLOT_GROUP:
            contents: Any = {name: self._slot(part) for name, part in each[0].items()}
            name = "write_slot"
        else:
            contents, name = self._contents(group, len(ids), each), "write_blocks"
        return self._program(name, group), arguments, contents

    def _check(self) -> None:
        if self.refusal:
            raise RunnerError(f"contents of the cache: {self.refusal}")

    def _ids(self, group: int, ids: Sequence[int]) -> Any:
        if group == SLOT_GROUP:
            return np.array([*ids, *ROW], np.int32)
        words = np.zeros(self._size(len(ids)), np.int32)
        words[: len(ids)] = ids
        return words

    def _size(self, count: int) -> int:
        """Number of blocks of the program that copies ``count``."""
        exact = count == 1 or not self._limits.buckets
        return count if exact else MAX_TRANSFER

    def _host(self, found: Any, part: Part) -> HostArray:
        """Copy a tensor, or tensors that follow each other, to host memory."""
        if isinstance(found, tuple):
            arrays = [self._backend.numpy(each) for each in found]
            data = np.stack([array.data for array in arrays])
            array = HostArray(data, arrays[0].dtype, data.shape)
        else:
            array = self._backend.numpy(found)
        data = _bits(array, part.dtype)
        layers = part.shape[:2] if len(part.shape) > 3 else ()
        if layers:  # blocks, the last of which may be padding
            data = data.reshape(*layers, -1, *part.shape[3:])[:, :, : part.shape[2]]
        return HostArray(np.ascontiguousarray(data), part.dtype, part.shape)

    def _contents(self, group: int, count: int, each: Sequence[Parts]) -> Blocks:
        io, size = self._io, self._size(count)
        if io.from_host is None or len(each) < count:
            (parts,) = each
            cells = (io.tensor or self._backend.tensor)(_padded(parts["cells"], size))
        else:
            cells = io.from_host([parts["cells"] for parts in each], size)
        if "scales" not in each[0] or self._groups[group].dtype == E4M3:
            return Blocks(cells)
        scales = joined([{"scales": parts["scales"]} for parts in each], BLOCKS)
        return Blocks(cells, self._backend.tensor(_padded(scales["scales"], size)))

    def _slot(self, array: HostArray) -> Any:
        shape = (1, *array.shape)
        one = HostArray(array.data.reshape(shape), array.dtype, shape)
        return self._backend.tensor(one)

    def _program(self, name: str, group: int) -> Callable[..., Any]:
        if (name, group) not in self._programs:
            io: Any = self._slot_io if group == SLOT_GROUP else self._block_io
            paged = None if group == SLOT_GROUP else self._groups[group]
            function = partial(FUNCTIONS[name], io, paged)
            info = info_of(name, None, self._limits)
            self._programs[name, group] = compile_program(self._backend, function, info)
        return self._programs[name, group]

    @cached_property
    def _block_io(self) -> BlockIO | None:
        own = self._backend.offers(BlockIO)
        has_scales = any(group.dtype == "int8" for group in self._groups)
        if own or not self._is_plain or has_scales:
            return own
        tracer = self._tracer()
        io, strict = composed_blocks(tracer, self._backend.tensor), self._strict()
        ids = StrictArray((1,), "int32")
        # A stage of a pipeline may have no layer of a group.
        for group in filter(attrgetter("layers"), self._groups):
            found = io.read(strict, group, ids)
            shape = (len(group.layers), 2, *found.cells[0].shape)
            cells = StrictArray(shape, found.cells[0].dtype)
            io.write(strict, group, ids, Blocks(cells))
        return composed_blocks(ResolvedOps(tracer), self._backend.tensor)

    @cached_property
    def _slot_io(self) -> SlotIO | None:
        own = self._backend.offers(SlotIO)
        if own:
            return own
        tracer = self._tracer()
        io, strict = composed_slots(tracer), self._strict()
        row = StrictArray((1 + len(ROW),), "int32")
        io.write(strict, row, io.read(strict, row))
        return composed_slots(ResolvedOps(tracer))

    def _tracer(self) -> Any:
        bucket = Bucket(tokens=1, rows=1)
        return Tracer(self._selection, bucket, self._limits.block_size)

    def _strict(self) -> State:
        return strict_state(self._spec, self._limits)


def _read_blocks(io: BlockIO, group: Paged, blocks: Any, state: Any) -> tuple[Any]:
    return (io.read(state, group, blocks),)


def _write_blocks(
    io: BlockIO, group: Paged, blocks: Any, contents: Any, state: Any
) -> tuple[Any]:
    return (io.write(state, group, blocks, contents),)


def _read_slot(io: SlotIO, _group: None, row: Any, state: Any) -> tuple[Any]:
    return (io.read(state, row),)


def _write_slot(
    io: SlotIO, _group: None, row: Any, contents: Any, state: Any
) -> tuple[Any]:
    return (io.write(state, row, contents),)


FUNCTIONS: dict[str, Callable[..., tuple[Any]]] = {
    "read_blocks": _read_blocks,
    "write_blocks": _write_blocks,
    "read_slot": _read_slot,
    "write_slot": _write_slot,
}


def _bits(array: HostArray, dtype: str) -> Any:
    """Return what NumPy stores of an array in ``dtype``.

    array: numbers of ``dtype``, or their bits.
    """
    bits = BITS.get(dtype)
    if dtype == array.dtype or (bits and array.data.dtype.name == bits):
        return array.data
    if dtype == E4M3:
        return encoded_e4m3(widen(array))
    return cast(widen(array), dtype).data


def _padded(array: HostArray, count: int) -> HostArray:
    """Return the contents with zeros for further blocks, ``count`` in all."""
    missing = count - array.shape[2]
    if not missing:
        return array
    shape = (*array.shape[:2], missing, *array.shape[3:])
    data = array.data.reshape(array.shape)
    data = np.concatenate([data, np.zeros(shape, data.dtype)], 2)
    return HostArray(data, array.dtype, data.shape)
