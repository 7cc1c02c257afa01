"""The device under test: its backend, its kernels, and the seed of every input."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from inl.config import EngineConfig
from inl.device import Device
from inl.errors import RequestError
from inl.executor.model_loader import kernel_selection
from inl.ops import catalog
from inl.plugin import make_backend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inl.backend.base import Backend
    from inl.spec.op import OpSpec
    from inl.spec.selection import KernelSelection


def fresh_seed() -> int:
    """A seed that nobody chose; whoever uses it prints it."""
    return int.from_bytes(os.urandom(4), "little")


@dataclass(frozen=True)
class Target:
    """A device and how thoroughly it is checked; opened when first needed.

    Raises :class:`~inl.errors.RequestError` for a seed that is no whole number from 0.
    """

    device: Device
    seed: int = field(default_factory=fresh_seed)
    full: bool = False
    """More seeds and more traffic: minutes instead of seconds."""

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            raise RequestError(
                f"seed: found {self.seed!r}, accepts a whole number of 0 or more"
            )

    @cached_property
    def backend(self) -> Backend:
        """Its backend, opened as an engine opens it."""
        return make_backend(self.device)

    @cached_property
    def selection(self) -> KernelSelection:
        """The kernels that an engine chooses from, other plugins' included."""
        return kernel_selection(self.backend, EngineConfig())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that it says it computes in."""
        return self.backend.traits.dtypes

    @property
    def ops(self) -> Mapping[str, OpSpec]:
        """Every op that is defined once the backend is loaded, third parties' too."""
        assert self.selection, "loading its kernels defines their ops"
        return catalog()

    @property
    def rounds(self) -> int:
        """Seeds that each check of a kernel is run with."""
        return 10 if self.full else 2

    def rng(self, *names: object) -> np.random.Generator:
        """Random numbers of one check, which depend on no other check."""
        return np.random.default_rng(
            [self.seed, *(zlib.crc32(str(name).encode()) for name in names)]
        )
