"""Names of inl-toolkit in ``inl``, as a type checker sees them."""

from __future__ import annotations

import inl
from inl import Device, Tensor, matmul, moe, nn
from inl.functional.moe import moe_dispatch
from inl.hardware.tpu import TPUBackend
from inl.inference import InferenceEngine, KVCache
from inl.kernels import KernelConfig
from inl.kernels.profile import Profile
from inl.kernels.tpu import tpu_custom_call
from inl.optimizers import Parallelism, get_optimal_parallelism


def train(x: Tensor, device: Device) -> Tensor:
    """Networks, also by ``inl.nn``."""
    layer: nn.Linear = inl.nn.Linear(2, 3)
    product: Tensor = matmul(layer(x), x)
    layer.to("cpu").forwrad(x)  # type: ignore[attr-defined]
    return product


def kernels(engine: InferenceEngine, profile: Profile) -> KernelConfig:
    """Views, hardware, kernels and plans."""
    blocks: tuple[int, ...] = KVCache(engine).blocks
    opened: bool = TPUBackend().initialize()
    plan: Parallelism = get_optimal_parallelism(
        model_size_params=len(blocks), num_devices=1, memory_per_device_gb=1.0
    )
    inl.kernels.gemmm(plan.fits, opened)  # type: ignore[attr-defined]
    moe.top_k(opened, profile.summary(), moe_dispatch, tpu_custom_call)  # type: ignore[attr-defined]
    return KernelConfig(block_size="small")  # type: ignore[arg-type]
