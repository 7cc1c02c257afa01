"""Base class of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from inl.device import Device
from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


@translating_methods
class Module:
    """A layer: its attributes hold its parameters and inner layers.

    A parameter is a :class:`Tensor` that requires a gradient. Subclasses define
    ``forward``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and its name, such as "0.weight"."""
        for name, value in self._children():
            if isinstance(value, Module):
                yield from value.named_parameters(f"{prefix}{name}.")
            elif isinstance(value, Tensor) and value.requires_grad:
                yield prefix + name, value

    def parameters(self) -> Iterator[Tensor]:
        """Yield every parameter."""
        return (value for _, value in self.named_parameters())

    def to(self, device: Device | str) -> Self:
        """Move the parameters to a device, in place; gradients are cleared."""
        target = Device(device) if isinstance(device, str) else device
        moved = [(each, each.detach().to(target)) for each in self.parameters()]
        for parameter, copy in moved:
            parameter.array, parameter.device = copy.array, target
            parameter.grad = None
        return self

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copy the parameters to the host, by name."""
        return {name: value.numpy() for name, value in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the parameters; raises :class:`RequestError` for other names or shapes.

        state: arrays that NumPy reads, in the layout of torch's state dicts.
        """
        mine = dict(self.named_parameters())
        given = {name: Tensor(value, "reference") for name, value in state.items()}
        wrong = sorted(
            name
            for name in {*mine, *given}
            if name not in mine
            or name not in given
            or mine[name].shape != given[name].shape
        )
        if wrong:
            raise RequestError(
                f"load_state_dict: missing, unknown or of another shape: "
                f"{', '.join(wrong):.400}; accepted: "
                f"{ {name: list(value.shape) for name, value in mine.items()}!s:.400}"
            )
        for name, parameter in mine.items():
            parameter.array = given[name].to(parameter.device).array

    def _children(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()
