"""Small neural networks on any device: tensors, layers, losses, optimizers.

Products run through the op catalog of the device's backend (``linear``, ``take_rows``),
the arithmetic between them through the array module of its tensors. Large language
models are loaded with :class:`~inl.InferenceEngine` instead.
"""

from __future__ import annotations

from typing import Any

from inl_toolkit.nn.int8 import Int8Network as Int8Network
from inl_toolkit.nn.int8 import export_int8 as export_int8
from inl_toolkit.nn.layers import Embedding as Embedding
from inl_toolkit.nn.layers import LayerNorm as LayerNorm
from inl_toolkit.nn.layers import Linear as Linear
from inl_toolkit.nn.layers import ReLU as ReLU
from inl_toolkit.nn.layers import Sequential as Sequential
from inl_toolkit.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from inl_toolkit.nn.losses import MSELoss as MSELoss
from inl_toolkit.nn.losses import cross_entropy as cross_entropy
from inl_toolkit.nn.losses import mse_loss as mse_loss
from inl_toolkit.nn.module import Module as Module
from inl_toolkit.nn.optim import SGD as SGD
from inl_toolkit.nn.optim import Adam as Adam
from inl_toolkit.nn.tensor import Tensor as Tensor
from inl_toolkit.nn.tensor import concatenate as concatenate
from inl_toolkit.nn.tensor import matmul as matmul
from inl_toolkit.nn.tensor import stack as stack
from inl_toolkit.nn.tensor import where as where

LAYERS = {
    "InlDynamics": ("inl_torch", "a torch module"),
    "init_inl_dynamics": ("inl_jax", "a JAX function"),
    "inl_dynamics_layer": ("inl_jax", "a JAX function"),
}
"""Package and kind of each layer of INL dynamics."""


def __getattr__(name: str) -> Any:
    """Import a layer of a framework; raises :class:`MissingPackage` without it."""
    from importlib import import_module

    from inl.errors import MissingPackage
    from inl.install_command import install_command

    if name not in LAYERS:
        raise AttributeError(f"module 'inl.nn' has no attribute {name!r}")
    package, kind = LAYERS[name]
    try:
        return getattr(import_module(f"{package}.dynamics"), name)
    except ImportError as error:
        raise MissingPackage(
            f"inl.nn.{name} is {kind}: {install_command(package.replace('_', '-'))}"
        ) from error
