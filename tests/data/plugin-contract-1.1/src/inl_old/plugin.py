"""Entry point ``old``, as written for plugin contract 1.1."""

from inl.device import DeviceInfo
from inl.plugin import hookimpl

INL_CONTRACT = (1, 1)
INL_FEATURES = frozenset()


def probe():
    return [DeviceInfo(0, "old NPU", 1 << 30, "written for 1.1")]


@hookimpl
def inl_register_backends(register):
    register("old", "inl_old.backend:OldBackend", probe="inl_old.plugin:probe")
    register("old_simple", "inl_old.simple:SimpleBackend")
    register("old_listed", "inl_old.listed:ListedBackend")


@hookimpl
def inl_register_kernels(register, device_type):
    if device_type == "old_simple":
        register("inl_old.simple:extra")


@hookimpl
def inl_register_models(register):
    register("OldForCausalLM", "inl.models.llama:MODEL")


@hookimpl
def inl_register_functions(register):
    register("old_arrays", "inl.ops.inl_functions:FUNCTIONS", modules=("old_arrays",))
