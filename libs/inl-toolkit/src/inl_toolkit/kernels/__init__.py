"""Kernels on NumPy, torch and JAX arrays: decorators, attention, products, profiles.

Functions compute on the device of their arrays, return arrays of the same framework and
keep its gradients. Language models use the kernels of a backend instead, see
``inl explain``.
"""

from inl.errors import DeviceError as DeviceError
from inl.errors import KernelError as KernelError
from inl_toolkit.functional.moe import moe_dispatch as moe_dispatch
from inl_toolkit.kernels.attention import flash_attention as flash_attention
from inl_toolkit.kernels.config import KernelConfig as KernelConfig
from inl_toolkit.kernels.decorators import cpu_kernel as cpu_kernel
from inl_toolkit.kernels.decorators import expert_kernel as expert_kernel
from inl_toolkit.kernels.decorators import gpu_kernel as gpu_kernel
from inl_toolkit.kernels.decorators import sparse_kernel as sparse_kernel
from inl_toolkit.kernels.decorators import tpu_kernel as tpu_kernel
from inl_toolkit.kernels.dense import gemm as gemm
from inl_toolkit.kernels.dense import layer_norm as layer_norm
from inl_toolkit.kernels.explaining import Explanation as Explanation
from inl_toolkit.kernels.explaining import explain as explain
from inl_toolkit.kernels.explaining import explain_call as explain_call
from inl_toolkit.kernels.profile import profile_kernel as profile_kernel
from inl_toolkit.kernels.rope import apply_rope as apply_rope
from inl_toolkit.kernels.rope import create_rope_cache as create_rope_cache
from inl_toolkit.kernels.sparse import block_sparse_matmul as block_sparse_matmul
