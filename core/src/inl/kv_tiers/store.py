"""Stores of plugins: records of blocks that engines of several hosts share.

What a record says of itself, and its signature, are checked by who reads it, so that a
store needs to be neither complete nor right: what is missing or wrong is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.errors import DeviceError, InlError

if TYPE_CHECKING:
    from inl.kv_transfer.checksums import Piece


class Store(ABC):
    """Values of bytes by name, which may disappear at any time. Thread-safe.

    Everything but :meth:`close` raises OSError or :class:`~inl.errors.InlError` while
    the store cannot be reached.
    """

    @abstractmethod
    def get(self, names: Sequence[str]) -> Sequence[Piece | None]:
        """Return the value of each name, ``None`` for those without one."""

    @abstractmethod
    def put(
        self,
        name: str,
        pieces: Sequence[Piece],
        *,
        replaces: bool = False,
        is_pinned: bool = False,
    ) -> bool:
        """Store what the pieces are together; ``False`` if there is no room.

        replaces: whether instead of an earlier value, which is kept otherwise.
        is_pinned: whether it is not dropped for others.
        """

    def close(self) -> None:  # noqa: B027 - some have nothing to free
        """Leave the store. Closing twice is allowed."""


def open_store(value: str) -> Store:
    """Open a store by a value of ``EngineConfig.kv_store``, NAME:ADDRESS.

    Raises :class:`~inl.errors.DeviceError` if it cannot be opened here.
    """
    from inl.plugin import registry
    from inl.plugin.contribution import describe

    name, _, address = value.partition(":")
    try:
        origin, factory = registry().function("store", name)
        store = factory(address)
    except InlError as error:
        raise DeviceError(f"EngineConfig.kv_store {value}: {error}") from error
    except Exception as error:
        raise DeviceError(
            f"EngineConfig.kv_store {value}: cannot be opened: {describe(error)}"
        ) from error
    if not isinstance(store, Store):
        raise DeviceError(
            f"{origin}: store {name}: found {type(store).__name__}, accepted: an "
            "inl.kv_tiers.store.Store"
        )
    return store
