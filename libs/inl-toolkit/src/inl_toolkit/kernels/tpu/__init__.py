"""The kernels under the names of the TPU documents.

They compute where their arrays are: on a TPU for arrays on one, else on that device.
"""

from inl_toolkit.kernels.attention import flash_attention as flash_attention
from inl_toolkit.kernels.decorators import tpu_kernel as tpu_kernel
from inl_toolkit.kernels.dense import gemm as gemm
from inl_toolkit.kernels.dense import layer_norm as layer_norm
from inl_toolkit.kernels.tpu.classes import TPUAttentionKernel as TPUAttentionKernel
from inl_toolkit.kernels.tpu.classes import TPUGEMMKernel as TPUGEMMKernel
from inl_toolkit.kernels.tpu.classes import TPULayerNormKernel as TPULayerNormKernel
from inl_toolkit.kernels.tpu.tpu_custom_call import (
    compile_tpu_kernel as compile_tpu_kernel,
)
from inl_toolkit.kernels.tpu.tpu_custom_call import register_tpu_op as register_tpu_op
