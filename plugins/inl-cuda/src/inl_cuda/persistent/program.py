"""Launches the persistent kernel of a model's step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

import torch

from inl.spec.cache import Cache
from inl.spec.step import Step
from inl_cuda.one_row.attention import LOG2E, is_wide
from inl_cuda.one_row.compiler import POINTER, Function, load_function
from inl_cuda.persistent.shape import (
    RANKS,
    Launch,
    Shape,
    options_of,
    slot_words,
    threads_of,
)
from inl_cuda.persistent.weights import PackedWeights, pack

TYPES: Final = (*[POINTER] * 14, ctypes.c_float, ctypes.c_float)


class PersistentStep:
    """The layers and the head of a loaded model, for steps of one row.

    eps: of the norms. scale: factor on attention scores. pdl: whether the kernel may
    start before the previous one ends.
    """

    def __init__(
        self, weights: Any, shape: Shape, launch: Launch, *, eps: float, scale: float,
        pdl: bool,
    ) -> None:  # fmt: skip
        self._shape, self._launch, self._pdl = shape, launch, pdl
        self._numbers = eps, scale * LOG2E
        self._weights = weights
        self._packed: PackedWeights = pack(weights, shape, launch)
        self._place = place = weights.head.weight.device
        self._steps = torch.zeros(1, dtype=torch.int32, device=place)
        self._slots = torch.zeros(
            slot_words(shape, launch), dtype=torch.int64, device=place
        )
        self._caches: tuple[int, ...] = ()
        self._pointers = self._slots

    def describe(self) -> str:
        """Name the kernel and the memory that it needs beside the model's weights."""
        megabytes = sum(each.nbytes for each in (*self._packed, self._slots)) / 1e6
        return f"one kernel of {self._launch.blocks} blocks, {megabytes:.0f} MB"

    def logits(
        self, row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        caches: Sequence[Cache], step: Step,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits [1, V] in float32, and write keys and values to the caches.

        row: embedding [1, H]. cos, sin: rotation [1, 32] of the row's position.
        """
        logits = torch.empty(
            (1, self._shape.vocab), dtype=torch.float32, device=self._place
        )
        launch, threads = self._launch, threads_of(self._shape, self._launch)
        table, packed = step.blocks[0], self._packed
        kernel = kernel_for(self._shape, launch, step, pdl=self._pdl)
        tensors = (
            self._layer_pointers(caches), packed.out, packed.down,
            self._weights.head.weight, packed.gains, row, cos, sin, table,
            step.positions, step.writes, self._steps, self._slots, logits,
        )  # fmt: skip
        kernel.launch(
            launch.blocks, threads, launch.shared,
            (*(each.data_ptr() for each in tensors), *self._numbers),
            cluster=RANKS, pdl=self._pdl, cooperative=True,
        )  # fmt: skip
        return logits

    def _layer_pointers(self, caches: Sequence[Cache]) -> torch.Tensor:
        """Return the addresses of each layer's matrices and cache."""
        addresses = tuple(part.data_ptr() for cache in caches for part in cache[:2])
        if addresses != self._caches:
            layers = self._weights.layers
            rows = [
                (each.attention.qkv.weight.data_ptr(), each.mlp.mlp.gate_up.data_ptr(),
                 *addresses[2 * index : 2 * index + 2])
                for index, each in enumerate(layers)
            ]  # fmt: skip
            self._pointers = torch.tensor(rows, device=self._place)
            self._caches = addresses
        return self._pointers


def kernel_for(shape: Shape, launch: Launch, step: Step, *, pdl: bool) -> Function:
    """Return the kernel for the dtypes of a step's arrays."""
    options = options_of(shape, launch) | {
        "WIDE_POSITIONS": is_wide(step.positions), "WIDE_TABLE": is_wide(step.blocks),
        "WIDE_WRITES": is_wide(step.writes), "PDL": int(pdl),
    }  # fmt: skip
    kernel = _load(tuple(options.items()), step.positions.device)
    kernel.allow_shared(launch.shared)
    return kernel


def resident_clusters(shape: Shape, launch: Launch, step: Step, *, pdl: bool) -> int:
    """Return how many clusters of a launch the chip of a step runs at once."""
    kernel = kernel_for(shape, launch, step, pdl=pdl)
    threads = threads_of(shape, launch)
    return kernel.resident_clusters(launch.blocks, threads, launch.shared, RANKS)


def source() -> str:
    """Return the CUDA C++ of the kernel."""
    return files(__package__).joinpath("step.cu").read_text()


@cache
def _load(options: tuple[tuple[str, int], ...], place: torch.device) -> Function:
    return load_function(source(), "step", TYPES, options, place)
