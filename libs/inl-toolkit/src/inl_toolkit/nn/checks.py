"""Checks of what users pass to tensors, layers and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def host_array(data: Any, dtype: str) -> NDArray[Any]:
    """Read data of a new tensor; raises :class:`RequestError` for other than numbers.

    A tensor of another framework that needs a gradient is refused: it would be lost.
    """
    if getattr(data, "requires_grad", False):
        raise RequestError(
            "Tensor: data: found a tensor that needs a gradient, which would be lost; "
            "accepted: its detach()"
        )
    try:
        return np.asarray(data, dtype)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"Tensor: data: found {data!r:.80}, accepted: an array or nested sequences "
            f"of numbers: {error}"
        ) from error


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape; raises :class:`RequestError` if there is none."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError as error:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        raise RequestError(
            f"Tensor: found shapes {listed}, accepted: shapes that broadcast"
        ) from error


def check_sizes(where: str, **sizes: int) -> None:
    """Raise :class:`RequestError` for sizes that are not whole numbers above 0."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise RequestError(
                f"{where}: {name}: found {value!r:.80}, accepted: a whole number "
                "above 0"
            )
