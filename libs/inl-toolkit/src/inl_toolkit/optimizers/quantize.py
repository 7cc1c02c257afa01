"""Quantization of linear layers, with the error that it measured."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from inl.errors import MissingPackage, RequestError
from inl.executor.model_loader import LanguageModel
from inl.install_command import install_command
from inl.weights.quantize.report import KINDS
from inl_toolkit.functional.out_of_memory import translating

log = logging.getLogger("inl")

FORMATS = ("bf16", "fp16", "fp8", "int8", "int4")


@translating
def quantize_for_inference(model: Any, dtype: str = "bf16") -> Any:
    """Return a copy of a model with quantized linear layers, and the measured error.

    The copy has a :class:`~inl.weights.quantize.report.QuantizationReport` as
    ``quantization``. Raises :class:`~inl.errors.RequestError` for another dtype or kind
    of model.

    A ``torch.nn.Module``: dtype is "bf16", "fp16"; "fp8" (e4m3) and "int8", with one
    scale per output; "int4", with one scale per 32 inputs of an output. Every other
    layer stays. On a CPU weights are decoded when the layer computes. On an NVIDIA GPU
    rows in float32 are rounded to a half type, and with "fp8" more than 128 rows to
    float8.

    A :class:`~inl.executor.model_loader.LanguageModel`: dtype is "fp8", "int8" or
    "int4", as ``EngineConfig.quantize``. Its matrices are read once to measure their
    error, and quantized again while an engine loads them.
    """
    if dtype not in FORMATS:
        raise RequestError(
            f"dtype: found {dtype!r:.80}, accepted: {', '.join(FORMATS)}"
        )
    if isinstance(model, LanguageModel):
        return _quantized_language(model, dtype)
    if not is_torch_module(model):
        raise RequestError(
            f"quantize_for_inference: found {type(model).__name__}, accepted: a "
            "torch.nn.Module, or a LanguageModel of open_model"
        )
    try:
        module = import_module("inl_torch.quantized_linear")
    except ImportError as error:
        raise MissingPackage(
            f"quantize_for_inference: {install_command('inl-torch')}"
        ) from error
    return module.quantize(model, dtype)


def _quantized_language(model: LanguageModel, dtype: str) -> Any:
    if dtype not in KINDS:
        raise RequestError(
            f"dtype: found {dtype!r} for a language model, accepted: "
            f"{', '.join(KINDS)}; it computes in EngineConfig(dtype=...)"
        )
    quantized: Any = model.quantized(dtype)
    log.info("%s", quantized.quantization.describe())
    return quantized


def is_torch_module(model: Any) -> bool:
    """Return whether ``model`` is a ``torch.nn.Module``; imports nothing."""
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__]
    return "torch.nn.modules.module.Module" in names
