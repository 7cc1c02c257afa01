"""Methods of an engine that load, unload and find LoRA adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inl.engine.options import GenerationOptions, check_adapter_name

if TYPE_CHECKING:
    from inl.adapters.registry import AdapterRegistry, AdapterUse


class AdapterLoading:
    """Base of :class:`~inl.engine.inference_engine.InferenceEngine`."""

    _adapters: AdapterRegistry

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return self._adapters.names

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a PEFT folder while the engine serves.

        Requests choose it by ``adapter=name`` from now on. Raises
        :class:`~inl.errors.RequestError` for a name that is taken or where
        ``EngineConfig.max_adapters`` are loaded, and
        :class:`~inl.errors.ModelError` for files that are not an adapter of this model.
        """
        check_adapter_name(name)
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter; those made before are served.

        Its place is free once they have finished. Raises
        :class:`~inl.errors.RequestError` for a name that is not loaded.
        """
        self._adapters.unload(name)

    def use_adapter(self, name: str | None) -> AdapterUse | None:
        """Find an adapter for several calls of :meth:`start`.

        They use it even if it is unloaded meanwhile, or another one gets its name.
        Raises :class:`~inl.errors.RequestError` for a name that is not loaded.
        """
        return self._adapters.use(name)

    def _use(self, options: GenerationOptions) -> AdapterUse | None:
        """Find the adapter of a call, once for all its prompts."""
        check_adapter_name(name := options.get("adapter"))
        return self._adapters.use(name)
