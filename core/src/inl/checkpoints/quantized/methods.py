"""Formats of quantized matrices by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from inl.checkpoints.quantized.auto_round import auto_round
from inl.checkpoints.quantized.bitsandbytes import bitsandbytes
from inl.checkpoints.quantized.gptq_awq import Awq, Gptq
from inl.checkpoints.quantized.hqq import Hqq
from inl.checkpoints.quantized.matrix_format import Format
from inl.checkpoints.quantized.modelopt import ModelOpt
from inl.checkpoints.quantized.mxfp4 import Mxfp4
from inl.checkpoints.quantized.quark import Quark
from inl.checkpoints.quantized.scaled import CompressedTensors, Fp8, fbgemm, mxfp8
from inl.checkpoints.quantized.torchao import TorchAo

METHODS: Final[dict[str, Callable[[Mapping[str, Any]], Format]]] = {
    "fp8": Fp8,
    "fbgemm_fp8": fbgemm,
    "mxfp8": mxfp8,
    "modelopt": ModelOpt,
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "bitsandbytes": bitsandbytes,
    "mxfp4": Mxfp4,
    "torchao": TorchAo,
    "auto-round": auto_round,
    "quark": Quark,
    "hqq": Hqq,
}
"""Readers of the options in ``quantization_config``."""
