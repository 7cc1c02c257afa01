"""The checks of ``inl check`` as pytest classes; a plugin's test file subclasses them.

::

    class TestNpu(BackendContract, KernelContract, RunnerContract, EngineContract):
        device = "npu:0"
        gaps = {"rms_norm/heads": "strided rows land in driver 2.1"}

Each check is a test of its own, named like the check. A gap covers the check of its
name and all whose names begin with it; what it covers must fail, so a gap that starts
to pass fails the run and is removed. Inputs are random: the seed is in every message,
and ``INL_CHECK_SEED`` sets it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pytest

from inl.device import Device
from inl.errors import RequestError
from inl.testing.check import CheckFailed, check_gaps, expired, explain, gap_of
from inl.testing.conformance import checks_of
from inl.testing.target import Target, fresh_seed

if TYPE_CHECKING:
    from inl.testing.check import Check

VARIABLE = "INL_CHECK_SEED"
"""Environment variable with the seed to check with."""


class Contract:
    """What the contracts share: a subclass names the device, and perhaps gaps."""

    device: ClassVar[str]
    """Such as ``"npu:0"``; it must be there, or the tests fail and say why."""
    gaps: ClassVar[Mapping[str, str]] = {}
    """Check name, or its first parts -> why it cannot pass yet."""
    full: ClassVar[bool] = False
    """More seeds and more traffic."""

    @classmethod
    def sections(cls) -> tuple[str, ...]:
        """Sections whose contracts this class inherits."""
        return tuple(
            section for kind, section in PARTS.items() if issubclass(cls, kind)
        )

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Make one test of each check."""
        for section in cls.sections():
            name = f"{section}_check"
            if name in metafunc.fixturenames:
                checks = checks_of(cls.target(), [section])
                metafunc.parametrize(name, checks, ids=[c.name for c in checks])

    @classmethod
    def target(cls) -> Target:
        """The device under test, opened once for each class."""
        found: Target | None = cls.__dict__.get("_target")
        if found is None:
            found = Target(Device(cls.device), seed=seed(), full=cls.full)
            cls._target = found
        return found

    _target: ClassVar[Target]

    def test_every_gap_covers_a_check(self) -> None:
        checks = checks_of(self.target(), self.sections())
        check_gaps(self.gaps, [check.name for check in checks])

    def keep(self, check: Check) -> None:
        """Run a check; where a gap covers it, it must fail."""
        gap = gap_of(check.name, self.gaps)
        try:
            check.run()
        except Exception as error:
            if gap is None:
                raise CheckFailed(f"{check.name}: {explain(error)}") from error
            pytest.xfail(f"{gap}: {self.gaps[gap]}")
        if gap is not None:
            pytest.fail(expired(check.name, gap), pytrace=False)


class BackendContract(Contract):
    """Tensors, state, memory, programs, and the backend's description of itself."""

    def test_backend(self, backend_check: Check) -> None:
        self.keep(backend_check)


class KernelContract(Contract):
    """Every op of the catalog against its body, on each of its cases and dtypes."""

    def test_kernel(self, kernel_check: Check) -> None:
        self.keep(kernel_check)


class RunnerContract(Contract):
    """A tiny model behind the backend's runner, whatever the frames."""

    def test_runner(self, runner_check: Check) -> None:
        self.keep(runner_check)


class EngineContract(Contract):
    """A tiny model in the engine, however it is scheduled."""

    def test_engine(self, engine_check: Check) -> None:
        self.keep(engine_check)


PARTS: Mapping[type[Contract], str] = {
    BackendContract: "backend",
    KernelContract: "kernel",
    RunnerContract: "runner",
    EngineContract: "engine",
}


def seed() -> int:
    """Read ``INL_CHECK_SEED``, or choose one; raises ``RequestError`` for no number."""
    given = os.environ.get(VARIABLE, "")
    if given and not (given.isascii() and given.isdigit()):
        raise RequestError(
            f"environment variable {VARIABLE}: found {given!r:.80}, accepts a whole "
            "number of 0 or more"
        )
    return int(given) if given else fresh_seed()
