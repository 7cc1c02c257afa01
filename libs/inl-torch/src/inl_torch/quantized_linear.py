"""Linear layers of torch modules with quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self, final

import torch
from torch import nn
from torch.nn import functional

from inl.weights.quantize.report import LayerError, QuantizationReport
from inl_torch.registered.quantized import PAIR, decoded, linear

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
STORED = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
"""Dtype that weights are stored in; two of int4 in a byte."""


@final
class QuantizedLinear(nn.Module):
    """A linear layer with weights in another format, which have no gradients.

    Returns the dtype of its input and computes as
    :mod:`inl_torch.registered.quantized` says. Conversions of the module, such as
    ``half()``, leave the stored format.
    """

    packed: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear, dtype: str) -> None:
        super().__init__()
        self.inputs, self.dtype = layer.in_features, dtype
        packed, scale = pack(layer.weight.detach(), dtype)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        bias = None if layer.bias is None else layer.bias.detach().clone()
        self.register_buffer("bias", bias)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [outputs, inputs] that the layer computes with."""
        return decoded(self.packed, self.scale, dtype, self.inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.packed, self.scale, self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the stored format to another device, but convert no dtype of it."""
        super()._apply(lambda each: _moved(each, fn), recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        held = [self.packed] + ([] if self.scale is None else [self.scale])
        return sum(each.numel() * each.element_size() for each in held)


def _moved(stored: torch.Tensor, fn: Callable[..., Any]) -> torch.Tensor:
    """Apply a conversion of modules to the bits, whose dtype it leaves."""
    bits: torch.Tensor = fn(stored.view(torch.uint8))
    return bits.view(stored.dtype)


def pack(weight: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the stored weights and their scales; see :class:`QuantizedLinear`."""
    if dtype in ("bf16", "fp16"):
        return weight.to(STORED[dtype]), None
    wide = weight.float()
    groups = wide.unsqueeze(1)
    if dtype == "int4":
        padded = functional.pad(wide, (0, -wide.shape[1] % PAIR))
        groups = padded.view(len(padded), -1, PAIR)
    scale = groups.abs().amax(-1).clamp_min(1e-30) / LARGEST[dtype]
    values = groups / scale[:, :, None]
    if dtype == "fp8":
        return values.flatten(1).to(STORED[dtype]), scale
    if dtype == "int8":
        return values.round().flatten(1).to(torch.int8), scale
    codes = (values.round() + 8).to(torch.uint8)
    low, high = codes.tensor_split(2, -1)
    return (low | high << 4).flatten(1), scale


def quantize(model: nn.Module, dtype: str) -> nn.Module:
    """As :func:`inl.optimizers.quantize_for_inference`."""
    copy = deepcopy(model).eval()
    if isinstance(copy, nn.Linear):
        copy = nn.Sequential(copy)
    layers = []
    for name, layer in list(copy.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        quantized = QuantizedLinear(layer, dtype)
        weight = layer.weight.detach()
        change = (quantized.weight(torch.float64) - weight).norm()
        norm = weight.double().norm()
        error = float(change / norm.clamp_min(1e-300))
        before = weight.numel() * weight.element_size()
        layers.append(LayerError(name, error, before, quantized.nbytes, float(norm)))
        parent, _, attribute = name.rpartition(".")
        setattr(copy.get_submodule(parent), attribute, quantized)
    copy.quantization = QuantizationReport(dtype, tuple(layers))  # type: ignore[assignment]
    return copy
