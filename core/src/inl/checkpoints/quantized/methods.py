"""Formats of quantized matrices by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from inl.weights.quant_bnb import bitsandbytes
from inl.weights.quant_format import Format
from inl.weights.quant_mxfp4 import Mxfp4
from inl.weights.quant_scaled import CompressedTensors, Fp8, modelopt
from inl.weights.quant_torchao import TorchAo
from inl.weights.quant_words import Awq, Gptq

METHODS: Final[dict[str, Callable[[Mapping[str, Any]], Format]]] = {
    "fp8": Fp8,
    "modelopt": modelopt,
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "bitsandbytes": bitsandbytes,
    "mxfp4": Mxfp4,
    "torchao": TorchAo,
}
"""Readers of the options in ``quantization_config``."""
