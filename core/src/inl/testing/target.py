"""Device under test: its backend, its kernels, and the seed of all inputs."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from inl.config import EngineConfig
from inl.device import Device
from inl.errors import RequestError
from inl.executor.load_plan import kernel_selection
from inl.ops import catalog
from inl.plugin import CONTRACT, make_backend, registry_for
from inl.spec.workload import TuningResults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inl.backend.base import Backend
    from inl.executor.model_loader import LanguageModel
    from inl.spec.kernel import Kernel
    from inl.spec.op import OpSpec
    from inl.spec.selection import KernelSelection


DEFAULT_SEED = 16
"""Seed of all inputs unless another is given, so that every run tests the same ones."""

VARIABLE = "INL_CHECK_SEED"
"""Environment variable that overrides :data:`DEFAULT_SEED`."""


def default_seed() -> int:
    """Return ``INL_CHECK_SEED``, or :data:`DEFAULT_SEED` if it is not set.

    Raises :class:`~inl.errors.RequestError` if it is not a whole number.
    """
    value = os.environ.get(VARIABLE, "")
    if value and not (value.isascii() and value.isdigit()):
        raise RequestError(
            f"environment variable {VARIABLE}: found {value!r:.80}, accepted: a "
            "whole number from 0"
        )
    return int(value) if value else DEFAULT_SEED


@dataclass(frozen=True)
class Target:
    """A device to check; its backend opens on first use.

    Raises :class:`~inl.errors.RequestError` if the seed is not a whole number from 0.
    """

    device: Device
    seed: int = field(default_factory=default_seed)
    full: bool = False
    """Test more seeds, larger sizes and longer traffic."""
    only: tuple[str, ...] = ()
    """Ops whose kernels are checked; empty checks all."""
    model: LanguageModel | None = None
    """A model whose steps are checked op by op, with its weights."""

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            raise RequestError(
                f"seed: found {self.seed!r}, accepted: a whole number from 0"
            )

    @cached_property
    def backend(self) -> Backend:
        """Backend of the device, opened as an engine does."""
        return make_backend(self.device)

    @cached_property
    def selection(self) -> KernelSelection:
        """Kernels that an engine selects from, including those of other plugins."""
        return kernel_selection(self.backend, EngineConfig())

    @cached_property
    def contract(self) -> tuple[int, int]:
        """Contract of the plugin that serves the device; the core's without one."""
        entry = registry_for(self.device.type).backend(self.device.type)
        return CONTRACT if entry is None else entry.contract

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Compute dtypes of the backend."""
        return self.backend.traits.dtypes

    @property
    def ops(self) -> Mapping[str, OpSpec]:
        """All ops defined once the backend is loaded, including third-party ops."""
        assert self.selection, "loading its kernels defines their ops"
        return catalog()

    def with_kernel(self, kernel: Kernel) -> Target:
        """Return a target with ``kernel`` in place of all kernels of its op."""
        others = (one for one in self.selection.kernels if one.op != kernel.op)
        selection = replace(
            self.selection, kernels=(*others, kernel), tuning_results=TuningResults()
        )
        twin = replace(self)
        vars(twin).update(backend=self.backend, selection=selection)
        return twin

    @property
    def rounds(self) -> int:
        """Number of seeds per kernel check."""
        return 10 if self.full else 2

    def rng(self, *names: object) -> np.random.Generator:
        """Return a generator for one check, independent of other checks."""
        return np.random.default_rng(
            [self.seed, *(zlib.crc32(str(name).encode()) for name in names)]
        )
