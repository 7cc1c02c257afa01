"""The checks of ``inl check`` as pytest classes; a plugin's test file subclasses them.

::

    class TestNpu(Conformance):
        device = "npu:0"
        gaps = {"rms_norm/heads": "strided rows land in driver 2.1"}

Each check is one test with the name of the check. A gap covers the check of that name
and all checks whose names start with it; covered checks are expected to fail, and one
that passes fails the run, so that the gap gets removed. Inputs are pseudorandom with a
fixed seed, which is part of each message; ``INL_CHECK_SEED`` changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pytest

from inl.device import Device
from inl.testing.check import CheckFailed, check_gaps, expired, explain, gap_of
from inl.testing.conformance import checks_of
from inl.testing.target import Target

if TYPE_CHECKING:
    from inl.testing.check import Check


class Contract:
    """Base class of the contracts: a subclass sets the device and any gaps."""

    device: ClassVar[str]
    """Device such as ``"npu:0"``; the tests fail if it is unavailable."""
    gaps: ClassVar[Mapping[str, str]] = {}
    """Check name, or its first parts -> reason why it cannot pass yet."""
    full: ClassVar[bool] = False
    """Test more seeds, larger sizes and longer traffic."""

    @classmethod
    def sections(cls) -> tuple[str, ...]:
        """Return the sections whose contracts this class inherits."""
        return tuple(
            section for kind, section in SECTIONS.items() if issubclass(cls, kind)
        )

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Generate one test per check."""
        for section in cls.sections():
            name = f"{section}_check"
            if name in metafunc.fixturenames:
                checks = checks_of(cls.target(), [section])
                metafunc.parametrize(name, checks, ids=[c.name for c in checks])

    @classmethod
    def target(cls) -> Target:
        """Return the device under test, opened once per class."""
        target: Target | None = cls.__dict__.get("_target")
        if target is None:
            target = Target(Device(cls.device), full=cls.full)
            cls._target = target
        return target

    _target: ClassVar[Target]

    def test_every_gap_covers_a_check(self) -> None:
        checks = checks_of(self.target(), self.sections())
        check_gaps(self.gaps, [check.name for check in checks])

    def run_check(self, check: Check) -> None:
        """Run a check; it must fail if a gap covers it."""
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
    """Checks of tensors, state, memory, programs and traits."""

    def test_backend(self, backend_check: Check) -> None:
        self.run_check(backend_check)


class KernelContract(Contract):
    """Checks of every op against its body, for each case and dtype."""

    def test_kernel(self, kernel_check: Check) -> None:
        self.run_check(kernel_check)


class RunnerContract(Contract):
    """Checks of the runner on a tiny model, with random frames."""

    def test_runner(self, runner_check: Check) -> None:
        self.run_check(runner_check)


class BlocksContract(Contract):
    """Checks of copies between the cache and the host."""

    def test_blocks(self, blocks_check: Check) -> None:
        self.run_check(blocks_check)


class EngineContract(Contract):
    """Checks of the engine on a tiny model, under different schedules."""

    def test_engine(self, engine_check: Check) -> None:
        self.run_check(engine_check)


class FeatureContract(Contract):
    """Checks of optional features, or that they are refused by name."""

    def test_feature(self, feature_check: Check) -> None:
        self.run_check(feature_check)


class RanksContract(Contract):
    """Checks of the collectives, for a backend that offers ranks."""

    def test_ranks(self, ranks_check: Check) -> None:
        self.run_check(ranks_check)


class Conformance(
    BackendContract,
    KernelContract,
    RunnerContract,
    BlocksContract,
    EngineContract,
    FeatureContract,
    RanksContract,
):
    """All checks of ``inl check``, including those that a later core adds."""


SECTIONS: Mapping[type[Contract], str] = {
    BackendContract: "backend",
    KernelContract: "kernel",
    RunnerContract: "runner",
    BlocksContract: "blocks",
    EngineContract: "engine",
    FeatureContract: "feature",
    RanksContract: "ranks",
}
