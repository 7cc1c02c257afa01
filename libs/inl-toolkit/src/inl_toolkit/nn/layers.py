"""Layers; parameters have the names and layouts of torch's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from inl.device import Device
from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.checks import check_sizes
from inl_toolkit.nn.module import Module
from inl_toolkit.nn.tensor import Tensor, linear

Rng = np.random.Generator | None


@final
class Sequential(Module):
    """Layers applied one after the other."""

    def __init__(self, *layers: Module) -> None:
        for layer in layers:
            if not isinstance(layer, Module):
                raise RequestError(
                    f"Sequential: found {layer!r:.80}, accepted: layers, each an "
                    "argument"
                )
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def _children(self) -> Iterator[tuple[str, Any]]:
        return ((str(index), layer) for index, layer in enumerate(self.layers))


@translating_methods
@final
class Linear(Module):
    """``x`` [..., inputs] @ ``weight`` [outputs, inputs].T + ``bias`` [outputs].

    Initialized as in torch: uniform in +- 1 / sqrt(inputs). rng: source of the numbers;
    by default a new one.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        device: Device | str | None = None,
        rng: Rng = None,
    ) -> None:
        check_sizes("Linear", inputs=inputs, outputs=outputs)
        rng, bound = rng or np.random.default_rng(), 1 / math.sqrt(inputs)

        def drawn(*shape: int) -> Tensor:
            values = rng.uniform(-bound, bound, shape)
            return Tensor(values, device, requires_grad=True)

        self.weight = drawn(outputs, inputs)
        self.bias = drawn(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight._tensor(x)
        if x.shape[-1:] != self.weight.shape[1:]:
            raise RequestError(
                f"Linear: found input {list(x.shape)}, accepted: [..., "
                f"{self.weight.shape[1]}]"
            )
        return linear(x, self.weight, self.bias)


@final
class ReLU(Module):
    """``max(x, 0)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


@translating_methods
@final
class LayerNorm(Module):
    """Layer normalization (Ba et al., 2016) over the last axis, of ``size``."""

    def __init__(
        self, size: int, *, eps: float = 1e-5, device: Device | str | None = None
    ) -> None:
        check_sizes("LayerNorm", size=size)
        self.eps = eps
        self.weight = Tensor(np.ones(size), device, requires_grad=True)
        self.bias = Tensor(np.zeros(size), device, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight._tensor(x)
        if x.shape[-1:] != self.weight.shape:
            raise RequestError(
                f"LayerNorm: found input {list(x.shape)}, accepted: [..., "
                f"{self.weight.shape[0]}]"
            )
        centered = x - x.mean(-1, keepdims=True)
        variance = (centered**2).mean(-1, keepdims=True)
        return centered * (variance + self.eps) ** -0.5 * self.weight + self.bias


@translating_methods
@final
class Embedding(Module):
    """Rows of ``weight`` [rows, width], initialized from a normal distribution."""

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        device: Device | str | None = None,
        rng: Rng = None,
    ) -> None:
        check_sizes("Embedding", rows=rows, width=width)
        values = (rng or np.random.default_rng()).standard_normal((rows, width))
        self.weight = Tensor(values, device, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        """Look up ``x``, int32 of any shape; raises :class:`RequestError` for others.

        The gradient is a product with the one-hot rows of ``x``.
        """
        rows, width = self.weight.shape
        index = x.numpy().reshape(-1)
        inside = ((index >= 0) & (index < rows)).all()
        if x.dtype != "int32" or not inside:
            raise RequestError(
                f"Embedding: found {x.dtype} indices, accepted: int32 of 0 to "
                f"{rows - 1}"
            )
        place, xp = self.weight.place, self.weight.place.xp

        def pull(g: Any) -> Any:
            hot = place.array(np.eye(rows, dtype=np.float32)[:, index])
            flat = xp.reshape(g, (-1, width))
            return place.linear(hot, xp.swapaxes(flat, 0, 1))

        taken = place.ops.take_rows(self.weight.array, place.array(index))
        shaped = xp.reshape(taken, (*x.shape, width))
        return self.weight._result(shaped, [(self.weight, pull)])
