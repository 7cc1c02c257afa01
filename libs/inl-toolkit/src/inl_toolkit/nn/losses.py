"""Losses, averaged over the rows."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from inl.errors import RequestError
from inl_toolkit.nn.module import Module
from inl_toolkit.nn.tensor import Tensor


def mse_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean of the squared differences."""
    return ((found - wanted) ** 2).mean()


def cross_entropy(logits: Tensor, classes: Any) -> Tensor:
    """Mean of ``-log softmax(logits)[row, class]``.

    logits: [T, C]. classes: T integers of 0 to C - 1, as a tensor or what NumPy reads.
    Raises :class:`RequestError` for others.
    """
    index = classes.numpy() if isinstance(classes, Tensor) else np.asarray(classes)
    rows, count = logits.shape
    fits = index.shape == (rows,) and index.dtype.kind in "iu"
    if not fits or not ((index >= 0) & (index < count)).all():
        raise RequestError(
            f"cross_entropy: found classes {list(index.shape)} of {index.dtype}, "
            f"accepted: {rows} integers of 0 to {count - 1}"
        )
    hot = Tensor(np.eye(count)[index], logits.device)
    return -(logits.log_softmax() * hot).sum() * (1 / rows)


@final
class MSELoss(Module):
    """As :func:`mse_loss`."""

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        return mse_loss(x, wanted)


@final
class CrossEntropyLoss(Module):
    """As :func:`cross_entropy`."""

    def forward(self, x: Tensor, classes: Any) -> Tensor:  # type: ignore[override]
        return cross_entropy(x, classes)
