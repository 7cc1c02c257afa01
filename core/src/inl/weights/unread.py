"""Arrays of a checkpoint that are read when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inl.dtypes import HostArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.weights.checkpoint import Checkpoint


class UnreadArray(HostArray):
    """A whole stored tensor. A backend that has it in another form never reads it.

    check: called with the array when it has been read, to raise for invalid numbers.
    """

    __slots__ = ("_check", "_checkpoint", "_name", "_read")
    _checkpoint: Checkpoint
    _name: str
    _check: Callable[[HostArray], None] | None
    _read: NDArray[Any] | None

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        check: Callable[[HostArray], None] | None = None,
    ) -> None:
        dtype, shape = checkpoint.spec(name)
        # Frozen: set as the initializer of a frozen dataclass does.
        for field, value in {
            "dtype": dtype,
            "shape": shape,
            "origin": (checkpoint, name),
            "_checkpoint": checkpoint,
            "_name": name,
            "_check": check,
            "_read": None,
        }.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> NDArray[Any]:
        """The stored elements; raises :class:`~inl.errors.CheckpointError`."""
        data = self._read
        if data is None:
            whole = self._checkpoint.tensor(self._name)
            assert (whole.dtype, whole.shape) == (self.dtype, self.shape)
            if self._check:
                self._check(whole)
            data = whole.data
            object.__setattr__(self, "_read", data)
        return data

    def rows(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Read entries of the first axis only, without checking them."""
        if self._read is not None:
            return super().rows(indices)
        return self._checkpoint.rows(self._name, indices)
