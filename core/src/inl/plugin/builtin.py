"""What the core itself brings, through the same hooks as everyone else."""

from __future__ import annotations

from inl.device import DeviceInfo, DeviceType
from inl.plugin.hooks import RegisterBackend, RegisterModel, hookimpl


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    """NumPy, the oracle that every other backend is compared with."""
    register(DeviceType.REFERENCE, "inl.backend.reference:ReferenceBackend", probe)


@hookimpl
def inl_register_models(register: RegisterModel) -> None:
    """The architectures under ``inl.models``."""
    for name in ("LlamaForCausalLM", "llama"):
        register(name, "inl.models.llama:MODEL")
    for name in ("Qwen2ForCausalLM", "qwen2"):
        register(name, "inl.models.qwen2:MODEL")


def probe() -> list[DeviceInfo]:
    """One device that is always there."""
    from inl.backend.host import host_memory

    return [DeviceInfo(0, "NumPy reference", host_memory().total)]
