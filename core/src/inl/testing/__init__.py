"""Conformance tests for backends; the contracts need ``inl-core[testing]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.testing.contracts import BackendContract as BackendContract
    from inl.testing.contracts import BlocksContract as BlocksContract
    from inl.testing.contracts import Conformance as Conformance
    from inl.testing.contracts import EngineContract as EngineContract
    from inl.testing.contracts import KernelContract as KernelContract
    from inl.testing.contracts import RanksContract as RanksContract
    from inl.testing.contracts import RunnerContract as RunnerContract

__all__ = [
    "BackendContract",
    "BlocksContract",
    "Conformance",
    "EngineContract",
    "KernelContract",
    "RanksContract",
    "RunnerContract",
]


def __getattr__(name: str) -> Any:
    """Import pytest only when a contract is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'inl.testing' has no attribute {name!r}")
    try:
        from inl.testing import contracts
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "_pytest"):
            raise
        from inl.errors import MissingPackage
        from inl.install_command import install_command

        raise MissingPackage(
            f"the contracts need pytest; try: {install_command('inl-core[testing]')}"
        ) from error
    return getattr(contracts, name)
