"""Edge TPUs: int8 TFLite files of ``inl.nn.export_int8`` on LiteRT's delegate."""

from __future__ import annotations

import ctypes
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from inl.errors import BackendUnavailable
from inl.install_command import install_command

LIBRARIES = {"linux": "libedgetpu.so.1", "darwin": "libedgetpu.1.dylib"}
COMPILED = b"edgetpu-custom-op"
"""Name of the custom op that replaces compiled ops in files of ``edgetpu_compiler``."""


def is_edge_tpu_available() -> bool:
    """Return whether LiteRT and the library of the Edge TPU are installed."""
    return EdgeTPUBackend().why_not() is None


@final
class EdgeTPUBackend:
    """One Edge TPU, which runs compiled int8 files. Constructing it opens nothing."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        """Such as "usb:0" or "pci:1"; ``None``: the first one."""
        self._delegate: Any = None

    def why_not(self) -> str | None:
        """Return what is missing, or ``None``."""
        library = LIBRARIES.get(sys.platform, "edgetpu.dll")
        if find_spec("ai_edge_litert") is None:
            return f"LiteRT is not installed: {install_command('inl-toolkit[edge]')}"
        try:
            ctypes.CDLL(library)
        except OSError:
            return (
                f"the library of the Edge TPU, {library}, was not found: install "
                "libedgetpu1-std of coral.ai, and connect the device"
            )
        return None

    def initialize(self) -> bool:
        """Open the device; ``False`` if it cannot be used, see :meth:`why_not`."""
        if self._delegate is None and self.why_not() is None:
            options = {} if self.device is None else {"device": self.device}
            module = import_module("ai_edge_litert.interpreter")
            library = LIBRARIES.get(sys.platform, "edgetpu.dll")
            try:
                self._delegate = module.load_delegate(library, options)
            except ValueError:  # the library finds no device
                return False
        return self._delegate is not None

    def load(self, path: str | Path) -> Any:
        """Return LiteRT's interpreter of a compiled file, on the device.

        Raises :class:`~inl.errors.BackendUnavailable` if the device is not open or the
        file has no op that was compiled for it.
        """
        data = Path(path).read_bytes()
        if COMPILED not in data:
            raise BackendUnavailable(
                f"edge tpu: {path}: was not compiled for it; run edgetpu_compiler "
                f"{path}"
            )
        if not self.initialize():
            reason = self.why_not() or "no Edge TPU is connected"
            raise BackendUnavailable(f"edge tpu: is not open: {reason}")
        module = import_module("ai_edge_litert.interpreter")
        interpreter = module.Interpreter(
            model_content=data, experimental_delegates=[self._delegate]
        )
        interpreter.allocate_tensors()
        return interpreter
