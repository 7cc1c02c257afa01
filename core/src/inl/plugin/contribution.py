"""What one plugin registers; each item is checked, and remembered with its giver."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from inl.device import DeviceType, Probe
from inl.errors import PluginError
from inl.plugin.discover import Origin

if TYPE_CHECKING:
    from inl.device import Device
    from inl.spec.functions import Functions
    from inl.spec.kernel import Kernel
    from inl.spec.model import Model

T = TypeVar("T")

TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend that a plugin registered; nothing of it is imported yet."""

    device_type: DeviceType
    backend: str | Callable[[Device], Any]
    probe: str | Probe | None
    origin: Origin


@dataclass(frozen=True, slots=True)
class FunctionsEntry:
    """Functions that a plugin registered; nothing of them is imported yet."""

    functions: str | Functions
    modules: tuple[str, ...]
    """Modules whose classes are the framework's arrays, by their first names."""


@dataclass(slots=True)
class Contribution:
    """Items of one plugin. Its methods are the ``register`` that hooks get.

    Each raises :class:`~inl.errors.PluginError` for an item of the wrong kind.
    """

    origin: Origin
    backends: dict[DeviceType, BackendEntry] = field(default_factory=dict)
    kernels: dict[DeviceType, list[Any]] = field(default_factory=dict)
    models: dict[str, str | Model] = field(default_factory=dict)
    functions: dict[str, FunctionsEntry] = field(default_factory=dict)

    def register_backend(
        self,
        device_type: str,
        backend: str | Callable[[Device], Any],
        probe: str | Probe | None = None,
    ) -> None:
        """Serve ``device_type``; without a probe, one device is always there."""
        kind = DeviceType(device_type)
        where = f"backend of {kind}"
        _check_target(where, backend, callable(backend), "a class")
        fits = probe is None or callable(probe)
        _check_target(f"probe of {kind}", probe, fits, "a function")
        if kind in self.backends:
            raise PluginError(f"{where}: registered twice")
        self.backends[kind] = BackendEntry(kind, backend, probe, self.origin)

    def register_kernels(self, device_type: DeviceType) -> Callable[[Any], None]:
        """Make the ``register`` of one device type's kernels."""

        def register(kernels: str | Kernel | Sequence[Kernel]) -> None:
            from inl.spec.kernel import Kernel

            fits = isinstance(kernels, Kernel)
            if not fits and isinstance(kernels, (list, tuple)):
                fits = all(isinstance(kernel, Kernel) for kernel in kernels)
            where = f"kernels for {device_type}"
            _check_target(where, kernels, fits, "a Kernel or a list of them")
            self.kernels.setdefault(device_type, []).append(kernels)

        return register

    def register_model(self, architecture: str, model: str | Model) -> None:
        """Serve checkpoints that name ``architecture``."""
        from inl.spec.model import Model

        if not isinstance(architecture, str) or not architecture.isidentifier():
            raise PluginError(
                f"model: found the architecture {architecture!r:.80}, accepted: a name "
                "such as LlamaForCausalLM"
            )
        where = f"model {architecture}"
        _check_target(where, model, isinstance(model, Model), "a Model")
        if architecture in self.models:
            raise PluginError(f"{where}: registered twice")
        self.models[architecture] = model

    def register_functions(
        self,
        framework: str,
        functions: str | Functions,
        modules: Sequence[str] = (),
    ) -> None:
        """Compute on arrays whose classes are defined in ``modules``."""
        from inl.spec.functions import Functions

        roots = (framework, *modules)
        for name in roots:
            if not isinstance(name, str) or not name.isidentifier():
                raise PluginError(
                    f"functions: found {name!r:.80}, accepted: a framework's name and "
                    "first names of modules, such as torch"
                )
        where = f"functions for {framework}"
        fits = isinstance(functions, Functions)
        _check_target(where, functions, fits, "Functions")
        if framework in self.functions:
            raise PluginError(f"{where}: registered twice")
        self.functions[framework] = FunctionsEntry(
            functions, tuple(modules) or (framework,)
        )


def _check_target(where: str, item: object, fits: bool, kind: str) -> None:
    named = isinstance(item, str) and TARGET.fullmatch(item)
    if not fits and not named:
        raise PluginError(
            f"{where}: found {item!r:.80}, accepted: a string 'module:attribute' "
            f"or {kind}"
        )


def resolve(origin: Origin, where: str, item: Any) -> Any:
    """Import what ``"module:attribute"`` names; anything else is itself.

    Raises :class:`~inl.errors.PluginError` that says whose it is and what failed.
    """
    if not isinstance(item, str):
        return item
    module, _, path = item.partition(":")

    def load() -> Any:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return found

    try:
        return guarded(load)
    except PluginError as error:
        raise PluginError(
            f"{origin}: cannot load {where}, {item}: {error}"
        ) from error.__cause__


def guarded(call: Callable[[], T]) -> T:
    """Call a plugin's code; whatever it raises becomes a PluginError of one line.

    The message is ``Type: message``, or the sentence alone where it is our own.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except PluginError as error:
        raise PluginError(one_line(error)) from error
    except BaseException as error:
        raise PluginError(describe(error)) from error


def describe(error: BaseException) -> str:
    """``Type: message`` in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Message of an error without line breaks, at most 400 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be shown)"
    return text if len(text) <= 400 else f"{text[:400]}..."
