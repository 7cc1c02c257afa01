"""Interface of a format of quantized matrices, and access to a matrix's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.quantized.matrix import BLOCK, QuantMatrix, halves
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors that store one matrix; every error names the tensor and format."""

    checkpoint: Checkpoint
    form: str
    names: Mapping[str, str]
    """Stored tensors by part; absent parts are not in it."""
    rounding: bool = False
    """Whether scales and offsets may be rounded to float16."""

    def has(self, part: str) -> bool:
        """Return whether the file has a part."""
        return part in self.names

    def shape(self, part: str) -> Shape:
        """Return the shape of a part; raises for an absent one."""
        return self.checkpoint.spec(self._name(part))[1]

    def dtype(self, part: str) -> str:
        """Return the dtype of a part; raises for an absent one."""
        return self.checkpoint.spec(self._name(part))[0]

    def check(self, part: str, *shapes: Shape, dtypes: tuple[str, ...] = ()) -> None:
        """Raise unless the part has one of the shapes and of the dtypes."""
        shape, dtype = self.shape(part), self.dtype(part)
        if shape not in shapes:
            listed = " or ".join(str(list(each)) for each in shapes)
            self.refuse(part, f"shape {list(shape)}", listed)
        if dtypes and dtype not in dtypes:
            self.refuse(part, dtype, ", ".join(dtypes))

    def array(self, part: str) -> HostArray:
        """Read a part."""
        return self.checkpoint.tensor(self._name(part))

    def integers(self, part: str) -> NDArray[Any]:
        """Read a part as stored."""
        array = self.array(part)
        return array.data.reshape(array.shape)

    def floats(self, part: str) -> NDArray[np.float32]:
        """Read a part of any float dtype; raises for NaN and infinity."""
        values = dequantize(self.array(part), self._name(part))
        if not np.isfinite(values).all():
            self.refuse(part, "NaN or infinity", "finite numbers")
        return values

    def blocks(
        self, dtype: str, scale: str, width: int, size: int, *, exact: str | None = None
    ) -> str:
        """Return the dtype whose blocks groups of ``width`` of ``size`` columns can be.

        exact: instead of ``dtype`` if nothing may be rounded. "float32" if the groups
        are no blocks, or float16 cannot store the scales.
        """
        wanted = dtype if self.rounding or exact is None else exact
        if width % BLOCK or size % BLOCK or wanted == "float32":
            return "float32"
        if self.dtype(scale) == "float16":
            return wanted
        scales = self.floats(scale)
        stored = halves(scales)
        if stored is None or not (self.rounding or np.array_equal(stored, scales)):
            return "float32"
        return wanted

    def refuse(self, part: str, found: str, accepted: str) -> None:
        """Raise :class:`CheckpointError` about a part."""
        raise CheckpointError(
            f"tensor {self._name(part)!r}: {self.form}: found {found}, "
            f"accepted: {accepted}"
        )

    def _name(self, part: str) -> str:
        if part not in self.names:
            beside = next(iter(self.names.values()), "nothing")
            raise CheckpointError(
                f"tensor {beside!r}: {self.form}: found no {part!r} beside it; "
                f"accepted: all of its tensors"
            )
        return self.names[part]


class Format(ABC):
    """One format with the options of a checkpoint."""

    name: str
    """Name with its options, for messages."""
    marker: str
    """Suffix of a tensor that only quantized matrices have."""
    parts: tuple[str, ...]
    """Names of the tensors of a matrix, behind its module's name."""
    ignored: tuple[str, ...] = ()
    """Suffixes of tensors that are not needed to decode."""
    joint: str = "."
    """Between a module's name and the name of a part."""

    @abstractmethod
    def spec(self, parts: Parts) -> tuple[str, Shape]:
        """Check the parts; return the dtype to load a matrix in, and its shape [N, K].

        The dtype is "float32" for a matrix that is decoded.
        """

    @abstractmethod
    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        """Read a matrix in the dtype of its spec; ``None`` if that cannot store it."""


class MatrixFormat(Format):
    """A format whose tensors are read as one description of codes and scales."""

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        matrix = self.matrix(parts)
        return matrix.values() if dtype == "float32" else matrix.blocks(dtype)

    @abstractmethod
    def matrix(self, parts: Parts) -> QuantMatrix:
        """Read a matrix."""


def option(
    config: Mapping[str, Any], name: str, accepted: tuple[Any, ...], default: Any = None
) -> Any:
    """Return an option of a ``quantization_config``; raises for another value."""
    value = config.get(name, default)
    if not any(value == each and type(value) is type(each) for each in accepted):
        raise CheckpointError(
            f"config field 'quantization_config.{name}': found {show(value)}, "
            f"accepted: {', '.join(map(str, accepted))}"
        )
    return value


def group_width(config: Mapping[str, Any]) -> int:
    """Return ``group_size``, -1 for one group; raises :class:`CheckpointError`."""
    value = config.get("group_size", 128)
    if type(value) is not int or (value != -1 and not 0 < value < 1 << 20):
        raise CheckpointError(
            f"config field 'quantization_config.group_size': found {show(value)}, "
            "accepted: -1 or an integer above 0"
        )
    return value


def columns_of(parts: Parts, part: str, width: int, groups: int) -> Any:
    """Return the group of each column from ``part``, ``None`` for runs of ``width``."""
    if not parts.has(part):
        return None
    order = parts.integers(part).astype(np.int64)
    if order.size and (order.min() < 0 or order.max() >= groups):
        parts.refuse(part, f"groups to {order.max()}", f"0 to {groups - 1}")
    plain = np.arange(order.size) // width
    return None if np.array_equal(order, plain) else order
