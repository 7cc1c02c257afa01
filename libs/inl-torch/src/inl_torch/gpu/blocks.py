"""Copies of blocks that leave a GPU beside its steps, through pinned host memory."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inl.backend.block_io import BlockIO, Blocks
from inl_torch.gpu.graphs import AsyncHostCopy
from inl_torch.tensors import aliased
from inl_torch.triton.step import copy_blocks

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from inl.dtypes import HostArray
    from inl.spec.cache import Paged, State


@cache
def copy_stream(place: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies to the host, which steps do not wait for."""
    return torch.cuda.Stream(place)  # type: ignore[no-untyped-call]


def read(state: State, group: Paged, blocks: torch.Tensor) -> Blocks:
    """Gather blocks after the steps before, and copy them beside those after."""
    cells = copy_blocks.read(state, group, blocks).cells
    return Blocks(AsyncHostCopy(cells, copy_stream(cells.device)))


def pinned(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array in pinned memory, which torch caches."""
    kind = np.dtype(dtype)
    data = torch.empty(prod(shape) * kind.itemsize, dtype=torch.uint8, pin_memory=True)
    return data.numpy().view(kind).reshape(shape)


def block_io(place: torch.device) -> BlockIO:
    """Return the capability of a GPU with Triton."""

    def tensor(host: HostArray) -> torch.Tensor:
        return aliased(host).to(place, non_blocking=True)

    return BlockIO(read, copy_blocks.write, tensor, pinned)
