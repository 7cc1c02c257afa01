"""INL: LLM inference with one model definition on any accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.device import Device as Device
from inl.device import DeviceType as DeviceType
from inl.errors import InlError as InlError

if TYPE_CHECKING:
    from inl.config import EngineConfig as EngineConfig
    from inl.engine.inference_engine import Completion as Completion
    from inl.engine.inference_engine import InferenceEngine as InferenceEngine
    from inl.functional import get_backend as get_backend
    from inl.functional import inl_dynamics as inl_dynamics
    from inl.functional import inl_dynamics_n_steps as inl_dynamics_n_steps
    from inl.functional import inl_dynamics_step as inl_dynamics_step
    from inl.functional import moe as moe
    from inl.functional import set_backend as set_backend
    from inl.nn import Tensor as Tensor
    from inl.nn import matmul as matmul

__version__ = "0.1.0"

LAZY = {
    "Completion": "inl.engine.inference_engine",
    "EngineConfig": "inl.config",
    "InferenceEngine": "inl.engine.inference_engine",
    "Tensor": "inl.nn",
    "get_backend": "inl.functional",
    "inl_dynamics": "inl.functional",
    "inl_dynamics_n_steps": "inl.functional",
    "inl_dynamics_step": "inl.functional",
    "matmul": "inl.nn",
    "set_backend": "inl.functional",
}
"""Public name -> module; imported on first use, to keep ``import inl`` fast.

Names that are not in ``__all__`` raise :class:`~inl.errors.MissingPackage` without the
package inl-toolkit.
"""

LAZY_MODULES = {
    "hardware": "inl.hardware",
    "inference": "inl.inference",
    "kernels": "inl.kernels",
    "moe": "inl.functional.moe",
    "nn": "inl.nn",
    "optimizers": "inl.optimizers",
}
"""Public modules of inl-toolkit, imported on first use."""

__all__ = [
    "Completion",
    "Device",
    "DeviceType",
    "EngineConfig",
    "InferenceEngine",
    "InlError",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from inl.garbage_collection import gc_disabled

    module = LAZY_MODULES.get(name) or LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'inl' has no attribute {name!r}")
    with gc_disabled():
        value: Any = import_module(module)
    if name in LAZY:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from importlib.util import find_spec

    names = {*globals(), *__all__}
    if find_spec("inl_toolkit") is not None:
        names |= {*LAZY, *LAZY_MODULES}
    return sorted(names)
