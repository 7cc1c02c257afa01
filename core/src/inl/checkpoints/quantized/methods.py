"""Formats of quantized matrices by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from inl.checkpoints.quantized.bitsandbytes import bitsandbytes
from inl.checkpoints.quantized.gptq_awq import Awq, Gptq
from inl.checkpoints.quantized.matrix_format import Format
from inl.checkpoints.quantized.mxfp4 import Mxfp4
from inl.checkpoints.quantized.scaled import CompressedTensors, Fp8, modelopt
from inl.checkpoints.quantized.torchao import TorchAo

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
