"""Optimizers that change parameters by their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.tensor import Tensor


@translating_methods
class Optimizer:
    """Base class: holds the parameters; :meth:`step` changes those with a gradient.

    Raises :class:`RequestError` for no parameters, and for a rate that is negative.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters = list(parameters)
        if not self.parameters or not lr >= 0:
            raise RequestError(
                f"{type(self).__name__}: found {len(self.parameters)} parameters and "
                f"lr {lr!r}, accepted: at least one, and 0 or more"
            )
        self.lr = lr
        self.state: dict[int, Any] = {}
        """State of each parameter, by its position."""

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Change every parameter that has a gradient."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                change = self.change(index, parameter, parameter.grad.array)
                parameter.array = parameter.array - change

    def change(self, index: int, parameter: Tensor, gradient: Any) -> Any:
        """Return what is subtracted from parameter ``index``."""
        raise NotImplementedError


@final
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as in torch."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float = 0.01, *, momentum: float = 0.0
    ) -> None:
        super().__init__(parameters, lr)
        self.momentum = momentum

    def change(self, index: int, parameter: Tensor, gradient: Any) -> Any:  # noqa: ARG002
        if self.momentum:
            held = self.state.get(index)
            gradient = gradient if held is None else self.momentum * held + gradient
            self.state[index] = gradient
        return self.lr * gradient


@final
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight_decay is decoupled, as in AdamW."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def change(self, index: int, parameter: Tensor, gradient: Any) -> Any:
        count, first, second = self.state.get(index, (0, 0.0, 0.0))
        (a, b), count = self.betas, count + 1
        first = a * first + (1 - a) * gradient
        second = b * second + (1 - b) * gradient * gradient
        self.state[index] = count, first, second
        root = (second / (1 - b**count)) ** 0.5 + self.eps
        direction = first / (1 - a**count) / root
        return self.lr * (direction + self.weight_decay * parameter.array)
