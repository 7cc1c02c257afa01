"""Backend of one device of an ONNX Runtime provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from inl.backend.base import Traits
from inl_directml.providers import open_provider, unavailable
from inl_directml.settings import provider
from inl_onnx.backend import OnnxBackend
from inl_onnx.graph import Graph
from inl_onnx.runtime import Runtime

if TYPE_CHECKING:
    from inl.device import Device

TRAITS = Traits(dtypes=("float16", "float32"), block_size=32, depth=2)


@final
class DirectmlBackend(OnnxBackend):
    """One device of a provider, ``INL_DIRECTML_PROVIDER``: DirectML unless it is set.

    Raises :class:`BackendUnavailable` where ONNX Runtime cannot use the device.
    """

    traits = TRAITS

    def __init__(self, device: Device) -> None:
        self.device = device
        opened = open_provider(provider(), device)
        if opened.name == "cpu":
            # ONNX Runtime converts most float16 operands to float32 on the CPU.
            self.traits = TRAITS._replace(dtypes=("float32", "float16"))
        elif opened.name == "webgpu":
            # float16 is an optional feature of adapters.
            self.traits = TRAITS._replace(dtypes=("float32",))
        self.runtime = Runtime(opened)
        self._open_session()

    def _open_session(self) -> None:
        """Raise :class:`BackendUnavailable` if the provider cannot open the device.

        A session says why; allocating a tensor first would abort the process.
        """
        graph = Graph()
        x = graph.input("x", "float32", (1,))
        model = graph.model([x + x]).SerializeToString()
        try:
            self.runtime.session(model, {}, 1)
        except Exception as error:
            name = self.runtime.provider.name
            reason = str(error).partition("\n")[0]
            raise unavailable(name, self.device, reason) from error
