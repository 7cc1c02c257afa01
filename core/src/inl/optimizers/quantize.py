"""Quantization of linear layers, with the error that it measured."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from inl.errors import MissingPackage, RequestError

FORMATS = ("bf16", "fp16", "fp8", "int8", "int4")


class LayerError(NamedTuple):
    """A quantized layer."""

    name: str
    error: float
    """Norm of the change of its weights, relative to their norm."""
    bytes_before: int
    bytes_after: int


class Quantization(NamedTuple):
    """What :func:`quantize_for_inference` did, as ``model.quantization``."""

    dtype: str
    layers: tuple[LayerError, ...]

    @property
    def error(self) -> float:
        """Largest relative error of a layer."""
        return max((layer.error for layer in self.layers), default=0.0)


def quantize_for_inference(model: Any, dtype: str = "bf16") -> Any:
    """Return a copy of a ``torch.nn.Module`` with quantized linear layers.

    dtype: "bf16", "fp16"; "fp8" (e4m3) and "int8", with one scale per output; "int4",
    with one scale per 32 inputs of an output. Weights are stored so and widened when
    the layer computes; activations, and every other layer, stay. The copy has a
    :class:`Quantization` as ``quantization``. Raises
    :class:`~inl.errors.RequestError` for another dtype or kind of model: a language
    model is quantized by its file (GGUF), and computes in ``EngineConfig.dtype``.
    """
    if dtype not in FORMATS:
        raise RequestError(
            f"dtype: found {dtype!r:.80}, accepted: {', '.join(FORMATS)}"
        )
    if not is_torch_module(model):
        raise RequestError(
            f"quantize_for_inference: found {type(model).__name__}, accepted: a "
            "torch.nn.Module; for a language model use a quantized GGUF file, or "
            "EngineConfig(dtype=...)"
        )
    try:
        module = import_module("inl_torch.quantized_linear")
    except ImportError as error:
        raise MissingPackage("quantize_for_inference: pip install inl-torch") from error
    return module.quantize(model, dtype)


def is_torch_module(model: Any) -> bool:
    """Return whether ``model`` is a ``torch.nn.Module``; imports nothing."""
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__]
    return "torch.nn.modules.module.Module" in names
