"""Networks as int8 TFLite files, which LiteRT runs on the CPU and on Edge TPUs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from inl.errors import MissingPackage, RequestError
from inl.install_command import install_command
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.nn.int8_file import write_file
from inl_toolkit.nn.layers import Linear, ReLU, Sequential
from inl_toolkit.nn.module import Module

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVELS = 255
"""Steps between the smallest and the largest int8."""


class Grid(NamedTuple):
    """Values ``scale * (q - zero)`` of int8 ``q``."""

    scale: float
    zero: int

    def round(self, x: NDArray[Any]) -> NDArray[np.int8]:
        """Round values to the grid; those outside become its ends."""
        steps = np.rint(np.asarray(x, np.float64) / self.scale) + self.zero
        rounded: NDArray[np.int8] = np.clip(steps, -128, 127).astype(np.int8)
        return rounded

    def values(self, q: NDArray[Any]) -> NDArray[np.float32]:
        """Return the values of int8 numbers."""
        return (self.scale * (q.astype(np.float32) - self.zero)).astype(np.float32)


class Int8Layer(NamedTuple):
    """``x`` [B, inputs] @ weight.T + bias, with ``relu`` or without."""

    weight: NDArray[np.int8]
    """[outputs, inputs], of ``weight_scale`` and zero 0."""
    weight_scale: float
    bias: NDArray[np.int32]
    """[outputs], in units of the scales of input and weight."""
    relu: bool
    output: Grid


@final
class Int8Network:
    """An int8 TFLite file of fixed shapes; made by :func:`export_int8`."""

    def __init__(self, batch: int, source: Grid, layers: tuple[Int8Layer, ...]) -> None:
        self.batch, self.source, self.layers = batch, source, layers
        self.data = write_file(self)
        """The file."""
        self._interpreter: Any = None

    @property
    def result(self) -> Grid:
        """Grid of the outputs."""
        return self.layers[-1].output

    def save(self, path: str | Path) -> None:
        """Write the file, as ``edgetpu_compiler`` and LiteRT read it."""
        Path(path).write_bytes(self.data)

    def __call__(self, x: Any) -> NDArray[np.float32]:
        """Compute ``x`` [batch, inputs] with LiteRT on the CPU; [batch, outputs].

        Raises :class:`~inl.errors.MissingPackage` without LiteRT, and
        :class:`~inl.errors.RequestError` for another shape.
        """
        if self._interpreter is None:
            self._interpreter = open_interpreter(self.data)
        wanted = self.batch, self.layers[0].weight.shape[1]
        values = np.asarray(x)
        if values.shape != wanted:
            raise RequestError(
                f"Int8Network: found {list(values.shape)}, accepted: {list(wanted)}"
            )
        return self.result.values(run(self._interpreter, self.source.round(values)))


@translating
def export_int8(model: Module, samples: Any, *, batch: int = 1) -> Int8Network:
    """Export Linear and ReLU layers to an int8 TFLite file.

    samples: [N, inputs], from which the range of each layer's outputs is measured.
    batch: rows of the input, which are fixed. Weights have one scale per layer. Raises
    :class:`~inl.errors.RequestError` for other layers, and
    :class:`~inl.errors.MissingPackage` without LiteRT, which has the file's schema.
    """
    x = np.asarray(samples, np.float64)
    parts = list(_parts(model))
    if not parts or x.ndim != 2 or not len(x) or not np.isfinite(x).all():
        raise RequestError(
            "export_int8: accepted: at least one Linear, and finite samples "
            f"[N, inputs]; found {len(parts)} and samples {list(x.shape)}"
        )
    if type(batch) is not int or batch < 1:
        raise RequestError(f"batch: found {batch!r}, accepted: 1 or more")
    source, layers = _grid(x), []
    grid = source
    for linear, relu in parts:
        weight = linear.weight.numpy().astype(np.float64)
        if x.shape[1] != weight.shape[1]:
            raise RequestError(
                f"export_int8: found {x.shape[1]} inputs of a Linear of "
                f"{weight.shape[1]}"
            )
        x = x @ weight.T
        bias = np.zeros(len(weight))
        if linear.bias is not None:
            bias = linear.bias.numpy().astype(np.float64)
        x = np.maximum(x + bias, 0) if relu else x + bias
        layers.append(_layer(weight, bias, relu, grid, _grid(x)))
        grid = layers[-1].output
    return Int8Network(batch, source, tuple(layers))


def _parts(model: Module) -> Iterator[tuple[Linear, bool]]:
    """Yield each Linear, and whether a ReLU follows it."""
    pending: Linear | None = None
    for layer in _flat(model):
        if isinstance(layer, ReLU) and pending is not None:
            yield pending, True
            pending = None
        elif isinstance(layer, Linear):
            if pending is not None:
                yield pending, False
            pending = layer
        else:
            raise RequestError(
                f"export_int8: found {type(layer).__name__}, accepted: Sequential of "
                "Linear, each with a ReLU after it or without"
            )
    if pending is not None:
        yield pending, False


def _flat(model: Module) -> Iterator[Module]:
    if not isinstance(model, Sequential):
        yield model
        return
    for layer in model.layers:
        yield from _flat(layer)


def _grid(x: NDArray[Any]) -> Grid:
    """Return the grid from the smallest to the largest value, and with 0 on it."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = float(np.float32(max(high - low, 1e-6) / LEVELS))
    return Grid(scale, int(np.clip(round(-128 - low / scale), -128, 127)))


def _layer(
    weight: NDArray[Any], bias: NDArray[Any], relu: bool, source: Grid, output: Grid
) -> Int8Layer:
    scale = float(np.float32(max(float(np.abs(weight).max()), 1e-6) / 127))
    unit = scale * source.scale
    limit = 2**31 - 1
    return Int8Layer(
        np.rint(weight / scale).clip(-127, 127).astype(np.int8),
        scale,
        np.rint(bias / unit).clip(-limit, limit).astype(np.int32),
        relu,
        output,
    )


def open_interpreter(data: bytes, delegates: Any = None) -> Any:
    """Return LiteRT's interpreter of a file; raises ``MissingPackage`` without it."""
    try:
        module = import_module("ai_edge_litert.interpreter")
    except ImportError as error:
        raise MissingPackage(
            f"int8 networks: {install_command('inl-toolkit[edge]')} (LiteRT)"
        ) from error
    # Without the default delegate, which rounds in its own way.
    resolver = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = module.Interpreter(
        model_content=data,
        experimental_delegates=delegates,
        experimental_op_resolver_type=resolver,
    )
    interpreter.allocate_tensors()
    return interpreter


def run(interpreter: Any, q: NDArray[np.int8]) -> NDArray[np.int8]:
    """Compute the only output from the only input."""
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], q)
    interpreter.invoke()
    found: NDArray[np.int8] = interpreter.get_tensor(
        interpreter.get_output_details()[0]["index"]
    )
    return found
